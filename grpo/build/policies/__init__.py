"""Policies from parameters and their directories, and how they draw."""
