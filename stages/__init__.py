"""One file per DVC stage: read parameters and artifacts, call grpo, write artifacts."""
