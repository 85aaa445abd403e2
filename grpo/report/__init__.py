"""Computes numbers and figures from artifacts and writes one self-contained page."""
