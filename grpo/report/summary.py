"""Terminal summary of a run: scores before and after training per arm, and the page's path."""

from pathlib import Path
from typing import Any

from grpo.params.parameters import BASE, Parameters
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import EVALUATION, read_table
from grpo.sampling.evaluation import LEAST_PROMPTS

SCORES = {"mean_at_k": "mean@{k}", "greedy": "greedy", "pass_at_k": "pass@{k}"}


def summarize(artifacts: Path, params: Parameters) -> str:
    """Returns one line per arm with its scores before and after, then the path of the report.

    Args:
      params: The parameters that the stages ran with.

    Raises:
      ArtifactError: If an evaluation is missing.
    """
    prompts = read_table(artifacts / "evaluations" / f"{BASE}.parquet", EVALUATION)
    show = _show if len(prompts) >= LEAST_PROMPTS else _show_value
    before = read_json(artifacts / "evaluations" / f"{BASE}.json")
    lines = []
    for arm in params.arms:
        rounds = params.rounds_of(arm)
        if not rounds:
            continue
        after = read_json(artifacts / "evaluations" / f"{rounds[-1]}.json")
        changes = [
            f"{label.format(k=after['k'])} {show(before[score])} -> {show(after[score])}"
            for score, label in SCORES.items()
            if score in after
        ]
        lines.append(f"{arm}: {'; '.join(changes)}")
    lines.append(f"report: {(artifacts / 'report' / 'index.html').resolve()}")
    return "\n".join(lines)


def _show(score: dict[str, Any]) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def _show_value(score: dict[str, Any]) -> str:
    """Omits the interval: with so few prompts it is meaningless."""
    return f"{score['value']:.3f}"
