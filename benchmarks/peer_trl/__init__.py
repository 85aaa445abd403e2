"""One GRPO update here and in TRL 1.16's GRPOTrainer: time and memory, part by part."""
