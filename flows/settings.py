"""Prefect settings that must be in the environment before its import; a user's values win."""

import os
from pathlib import Path

SETTINGS = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    # Only for flows that run without a server from flows/server.py.
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    # The console shows the stages' own lines; Prefect's log records go to its UI.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_CLI_PROMPT": "false",
}


def prepare_environment(workspace: Path) -> None:
    """Sets the unset variables: disables telemetry and keeps Prefect's files in the workspace."""
    home = workspace.resolve() / ".work" / "prefect"
    home.parent.mkdir(exist_ok=True)  # otherwise Prefect warns
    for name, value in {**SETTINGS, "PREFECT_HOME": str(home)}.items():
        os.environ.setdefault(name, value)
