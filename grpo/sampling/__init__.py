"""Draws rollouts, scores them, and evaluates policies on held-out prompts."""
