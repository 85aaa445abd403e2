"""Seconds measured on this machine, which the page shows and tracked files leave out."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from grpo.params.parameters import Parameters
from grpo.report.comparison import Curve
from grpo.report.reading import Run
from grpo.runtime.artifacts.usage import Usage, read_usage
from grpo.wiring.allocation import reads_profile

START_UP = ("load", "start")
WAITING = "waiting"  # of the trainer, for samplers that work beside it
ACTIVITY_OF_PART = {
    **dict.fromkeys(START_UP, "start-up"),
    WAITING: "sampling",
    "sampling": "sampling",
    "simulation": "simulation",
    "judging": "judging",
    "update": "update",
    "weights": "weights",  # of the policy, sent to samplers
}
PART_OF_ACTIVITY = {
    "start-up": "start_up",  # imports, and loading of policies and judges
    "sampling": "sampling",
    "simulation": "sampling",
    "judging": "judging",
    "update": "update",
    "weights": "weights",
}
PARTS = (*dict.fromkeys(PART_OF_ACTIVITY.values()), "other")
ACTIVITIES = (
    *("profile", "start-up", "sampling", "simulation", "judging", "update", "weights", "other"),
)


class Span(NamedTuple):
    """A time in which a stage did one thing, in seconds."""

    activity: str
    start: float
    end: float


def stages_of(params: Parameters) -> list[str]:
    """Returns the DVC names of the pipeline's stages before the report."""
    once = ["check", "prepare", "base", "evaluate-base", "profile"]
    curricula = [f"curriculum@{arm}" for arm in params.arms]
    rounds = [
        f"{stage}@{name}"
        for name in params.rounds
        for stage in ("rollout", "score", "train", "evaluate")
    ]
    return [*once, *curricula, *rounds]


def read_usages(params: Parameters) -> dict[str, Usage]:
    """Returns the measured usage by stage; a stage restored from a cache has no entry."""
    measured = {stage: read_usage(stage) for stage in stages_of(params)}
    return {stage: usage for stage, usage in measured.items() if usage is not None}


def seconds_curves(run: Run, usages: Mapping[str, Usage]) -> dict[str, Curve]:
    """Returns each arm's curve over seconds; empty if a stage on a curve was not measured."""
    curves = {}
    for arm in run.arms:
        chain = run.chain(arm)
        stages = [_stages_behind(run, arm, chain[1 : i + 1]) for i in range(len(chain))]
        if any(stage not in usages for stage in stages[-1]):
            return {}
        costs = tuple(float(sum(usages[stage].seconds for stage in each)) for each in stages)
        curves[arm] = Curve(arm=arm, policies=tuple(chain), costs=costs)
    return curves


def seconds_by_activity(run: Run, usages: Mapping[str, Usage], arm: str) -> dict[str, float]:
    """Returns the seconds up to the arm's last policy, by ACTIVITIES."""
    seconds = dict.fromkeys(ACTIVITIES, 0.0)
    for stage in _stages_behind(run, arm, run.chain(arm)[1:]):
        usage = usages[stage]
        if stage == "profile":
            seconds["profile"] += usage.seconds
            continue
        for part, passed in usage.seconds_by_part.items():
            seconds[ACTIVITY_OF_PART.get(part, "other")] += passed
        rest = usage.seconds - sum(usage.seconds_by_part.values())
        seconds["other"] += max(0.0, rest)
    return seconds


def timeline(usage: Usage) -> list[Span]:
    """Returns what a stage with iterations did when, from the end of its start-up on."""
    spans = [
        Span(ACTIVITY_OF_PART.get(part, "other"), start, end)
        for part, start, end in usage.spans
        if part not in (*START_UP, WAITING)
    ]
    first = min((each.start for each in spans), default=0.0)
    return [Span(each.activity, each.start - first, each.end - first) for each in spans]


def missing_usages(run: Run, usages: Mapping[str, Usage], arm: str) -> list[str]:
    """Returns the stages up to the arm's last policy that were not measured here."""
    return [each for each in _stages_behind(run, arm, run.chain(arm)[1:]) if each not in usages]


def seconds_by_part(run: Run, usages: Mapping[str, Usage], arm: str) -> dict[str, float]:
    """Returns the seconds up to the arm's last policy by PARTS, the profile's among them.

    The last entry, `total`, is their sum.
    """
    behind = [usages[stage] for stage in _stages_behind(run, arm, run.chain(arm)[1:])]
    return {**sum_by_part(behind), "total": sum(usage.seconds for usage in behind)}


def sum_by_part(usages: Iterable[Usage]) -> dict[str, float]:
    """Returns the seconds of several stages by PARTS."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for usage in usages:
        known = 0.0
        for part, passed in usage.seconds_by_part.items():
            if part in ACTIVITY_OF_PART:
                seconds[PART_OF_ACTIVITY[ACTIVITY_OF_PART[part]]] += passed
                known += passed
        seconds["other"] += usage.seconds - known
    return seconds


def _stages_behind(run: Run, arm: str, rounds: Iterable[str]) -> list[str]:
    """Returns the stages that rounds of an arm's chain need; the profile as `counted_costs`."""
    names = list(rounds)
    arms = {arm, *(run.params.rounds[name].arm for name in run.chain(arm)[1:])}
    profile = ["profile"] if any(reads_profile(run.params, each) for each in arms) else []
    return profile + [stage for name in names for stage in stages_of_round(name)]


def stages_of_round(name: str) -> list[str]:
    """Returns the stages that make a round, without its evaluation."""
    return [f"{stage}@{name}" for stage in ("rollout", "score", "train")]
