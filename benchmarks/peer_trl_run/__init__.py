"""Compares a whole run, from process start to evaluation reward, with TRL 1.16's GRPOTrainer."""
