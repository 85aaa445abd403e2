"""Policies whose step is a token: causal language models of `transformers`."""
