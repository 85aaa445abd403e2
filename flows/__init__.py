"""Runs the stages of dvc.yaml side by side under Prefect; never imports torch."""
