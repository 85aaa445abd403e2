"""Proposes an arm from a finished profile, and reports the errors of earlier predictions."""
