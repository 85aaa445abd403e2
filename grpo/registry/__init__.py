"""Policies in MLflow's model registry: promotion gate, lineage checks, upload and loading."""
