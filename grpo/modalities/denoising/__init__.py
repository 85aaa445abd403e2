"""Policies whose step is a denoising step: flow-matching models of `diffusers`."""
