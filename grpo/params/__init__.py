"""Typed parameters: what a run is, and what its machine, policy, task and reward need."""
