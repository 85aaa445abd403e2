"""Encoder-decoder models of transformers; a step is a target token."""
