"""Policy updates of one round: batches, log-probs under frozen policies, drift, audits, metrics."""
