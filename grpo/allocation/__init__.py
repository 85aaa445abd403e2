"""Allocation of compute to prompts: difficulty profiles, curricula, prompt selection."""
