"""Where an artifact comes from: read from dvc.lock, written to MLflow, printed and drawn."""

import os

# MLflow reads these when it is first imported: nothing leaves the machine.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines per run
# Nobody's choice: a pickle runs code when it is read.
os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"
