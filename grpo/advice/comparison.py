"""What was predicted of a round against what happened in it."""

from dataclasses import dataclass
from pathlib import Path

from grpo.advice.facts import Facts
from grpo.advice.prediction import Amounts, plan_phase, predict_round
from grpo.params.parameters import Parameters
from grpo.report.reading import read_cost, read_rollouts
from grpo.runtime.artifacts.tables import is_judged


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A finished round."""

    round: str
    predicted: Amounts
    actual: Amounts


def compare_rounds(artifacts: Path, params: Parameters, facts: Facts) -> list[Compared]:
    """Returns the finished rounds of `params`, in the file's order.

    A round whose rollouts are of prompts that its curriculum does not give is left out: it was
    made with other parameters.

    Raises:
      ArtifactError: If a file of a finished round is broken.
    """
    found = []
    for name, each in params.rounds.items():
        if not (artifacts / "training" / name / "summary.json").exists():
            continue
        actual = count_round(artifacts, name, facts)
        planned = set(plan_phase(params, each.arm, each.phase, facts)["prompt_id"])
        if planned.issuperset(actual.prompts):
            predicted = predict_round(params, name, facts)
            found.append(Compared(round=name, predicted=predicted, actual=actual.amounts))
    return found


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a finished round took and yielded."""

    prompts: frozenset[str]
    amounts: Amounts


def count_round(artifacts: Path, name: str, facts: Facts) -> Counted:
    """Returns what a round took and yielded, counted in its artifacts."""
    sampled = read_cost(artifacts / "rollouts" / name / "summary.json")
    trained = read_cost(artifacts / "training" / name / "summary.json")
    rollouts = read_rollouts(artifacts, name, facts.profile)
    judged = rollouts[is_judged(rollouts)]
    groups = judged.groupby("prompt_id")["outcome"].agg(["size", "mean", "min", "max"])
    amounts = Amounts(
        groups=float(len(groups)),
        uniform_groups=float((groups["min"] == groups["max"]).sum()),
        rollouts=float(len(rollouts)),
        sampled_steps=float(sampled["sampled_steps"]),
        trained_steps=float(trained["trained_steps"]),
        sampling_flops=float(sampled["flops"]),
        update_flops=float(trained["flops"]),
        signal=float((groups["size"] * groups["mean"] * (1 - groups["mean"])).sum()),
    )
    return Counted(prompts=frozenset(groups.index), amounts=amounts)


def relative_error(predicted: float, actual: float) -> float | None:
    """Returns predicted / actual - 1; None if nothing happened."""
    return predicted / actual - 1 if actual else None
