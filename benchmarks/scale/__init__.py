"""Estimates the cost of runs on many GPUs from formulas, measurements and assumptions."""
