"""What several modalities need: adapters, optimizers, FLOPs, policy directories."""
