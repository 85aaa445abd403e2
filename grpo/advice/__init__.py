"""Proposes an arm from a finished profile, and reports how well its predictions held."""
