"""Where a stage's work is done: in its own process, in workers here, or on a Ray cluster."""
