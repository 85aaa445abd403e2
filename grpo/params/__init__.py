"""Typed parameters of a run: machine, policy, task, reward, arms and rounds."""
