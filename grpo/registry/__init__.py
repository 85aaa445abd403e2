"""Policies in MLflow's registry: who may become champion, what it was made from, and its bytes."""
