"""What a run on many GPUs would take: worked out from formulas, measurements and assumptions."""
