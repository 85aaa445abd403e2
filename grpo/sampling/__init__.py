"""Sampling and judging of rollouts, and evaluation of policies on held-out prompts."""
