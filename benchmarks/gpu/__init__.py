"""Measures everything that needs a GPU with one command, part by part."""
