"""Lineage of artifacts: read from dvc.lock, recorded in MLflow, printed as text and SVG."""

import os

# MLflow reads these on import. They disable telemetry.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # avoids two lines per run
# Not configurable: reading a pickle executes code.
os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"
