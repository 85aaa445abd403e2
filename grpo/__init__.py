"""Spends GRPO's compute where the learning signal lives."""
