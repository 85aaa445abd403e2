"""Code shared by modalities: adapters, optimizers, FLOPs, policy directories."""
