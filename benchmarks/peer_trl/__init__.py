"""Compares time and memory of a GRPO update between this project and TRL 1.16's GRPOTrainer."""
