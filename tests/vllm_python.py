"""The Python of vLLM's environment, which `make vllm` makes; tests with a real engine need it."""

import importlib.util
import os
from pathlib import Path

import pytest

from grpo.modalities.tokens.vllm import PYTHON

MADE = Path(__file__).parents[1] / ".venv-vllm/bin/python"


def require_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the Python that has vLLM in the environment; skips the test if there is none."""
    if os.environ.get(PYTHON) or importlib.util.find_spec("vllm") is not None:
        return
    if not MADE.exists():
        pytest.skip(f"needs vLLM: run make vllm, or name a Python that has it in {PYTHON}")
    monkeypatch.setenv(PYTHON, str(MADE))
