"""Executors of a stage's jobs: the stage's own process, local workers, or a Ray cluster."""
