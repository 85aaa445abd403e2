"""Artifacts in and out: atomic, validated, the same bytes for the same content."""
