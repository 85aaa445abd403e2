"""Policies whose step is a chunk of a robot's actions, and their simulator."""
