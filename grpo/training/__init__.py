"""Updates of one round: batches, frozen log-probs, drift, audits, metrics."""
