"""Base policies from parameters: fresh, or read from where they are."""
