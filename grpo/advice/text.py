"""The advice as text, and the proposed arm as YAML to paste."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from grpo.advice.facts import Facts, read_facts
from grpo.advice.prediction import (
    Amounts,
    Compared,
    allocates_online,
    compare_rounds,
    predict_arm,
    profile_flops,
    relative_error,
)
from grpo.advice.proposal import SIZES, Candidate, Proposal, propose
from grpo.advice.seconds import ComparedSeconds, Rates, Seconds, compare_seconds, read_rates
from grpo.allocation.posterior import DEAD_RATE
from grpo.params.parameters import Parameters
from grpo.params.yaml import dump_yaml
from grpo.report.learned import explain_missing_signal
from grpo.report.words import (
    SPACE,
    format_count,
    format_flops,
    format_percent,
    format_seconds,
)
from grpo.wiring.policies import draws_of_arm, draws_of_profile

DASH = "-"
Each = TypeVar("Each", bound=Compared | ComparedSeconds)
CAVEAT = """\
Predictions cover cost and the number of groups with both outcomes under the base policy; both
change as the policy learns. They do not say which arm learns more. FLOPs are not seconds: a step
of sampling takes longer than its FLOPs."""


def advise(artifacts: Path, params: Parameters, file: Path) -> str:
    """Returns the advice from a finished profile and the errors of earlier predictions.

    Args:
      file: The parameter file, which the advice names.

    Raises:
      ArtifactError: If there is no profile, or an artifact is broken.
    """
    facts = read_facts(artifacts, params)
    if facts.profile["outcome_rate"].isin([0.0, 1.0]).all():
        return "\n\n".join([_profile(facts), _nothing(facts)]).replace(SPACE, " ")
    reasons = explain_missing_signal(artifacts, params)
    if reasons and all(reasons.values()):
        return "\n\n".join([_profile(facts), _nothing_learned(reasons)]).replace(SPACE, " ")
    online = [arm for arm in params.arms if params.rounds_of(arm) and allocates_online(params, arm)]
    params = _without_rounds(params, online)
    if not params.rounds:
        return "\n\n".join([_profile(facts), *_not_predicted(online)]).replace(SPACE, " ")
    proposal = propose(params, facts)
    rates = read_rates(artifacts, params, facts)
    compared = compare_rounds(artifacts, params, facts)
    pasted = f"# Merge into {file}.\n{snippet(proposal)}" if proposal.chosen else ""
    sections = [
        _profile(facts),
        "\n".join([_arms(params, proposal, facts), *_not_predicted(online)]),
        _seconds(proposal, facts, rates),
        _sizings(proposal, facts),
        pasted,
        CAVEAT,
        _comparison(params, compared) if compared else "",
        "" if isinstance(rates, str) else _compared_seconds(params, compared, rates),
    ]
    return "\n\n".join(filter(None, sections)).replace(SPACE, " ")


def snippet(proposal: Proposal) -> str:
    """Returns the proposed arm and its rounds as YAML, to be merged into the parameter file."""
    params, name = proposal.params, proposal.name
    rounds = {each: params.rounds[each].model_dump(mode="json") for each in params.rounds_of(name)}
    content = {"arms": {name: params.arms[name].model_dump(mode="json")}, "rounds": rounds}
    return dump_yaml(content, compact=True).rstrip()


def _without_rounds(params: Parameters, arms: Sequence[str]) -> Parameters:
    """Returns the parameters without the rounds of some arms."""
    rounds = {name: each for name, each in params.rounds.items() if each.arm not in arms}
    return params.model_copy(update={"rounds": rounds})


def _not_predicted(online: Sequence[str]) -> list[str]:
    """Returns a remark per arm that chooses prompts or group sizes online."""
    return [
        f"{arm} is not predicted: it chooses prompts or group sizes by outcomes of earlier "
        "iterations."
        for arm in online
    ]


def _profile(facts: Facts) -> str:
    """Returns the summary of the profile: dead prompts and shares of uniform groups."""
    profile, posterior = facts.profile, facts.posterior
    rate, count = profile["outcome_rate"], int(profile["rollouts"].max())
    never, always = posterior.never_solved().mean(), posterior.always_solved().mean()
    sizes = np.array(SIZES)
    equal = [posterior.uniform_chance(np.full(len(profile), size)).mean() for size in sizes]
    shares = "   ".join(
        f"{n}: {format_percent(float(e))}" for n, e in zip(sizes, equal, strict=True)
    )
    return (
        f"PROFILE  {format_count(len(profile))} prompts, {count} rollouts each, "
        f"{format_percent(float(rate.mean()))} of them solved; it took "
        f"{format_flops(float(facts.cost.flops))}\n"
        f"Dead prompts: {format_percent(float(never + always))} "
        f"({format_percent(float(never))} never, {format_percent(float(always))} always solved: "
        f"rates within {format_percent(DEAD_RATE)} of 0 or 1).\n"
        f"In the profile {format_percent(float((rate == 0).mean()))} have 0 of {count} and "
        f"{format_percent(float((rate == 1).mean()))} have {count} of {count}, but that is few "
        "draws: rates are read as Beta\n"
        f"posteriors, with the prior Beta({facts.prior.alpha:.2f}, {facts.prior.beta:.2f}) fitted "
        "to all prompts.\n"
        "A group whose outcomes are all equal has no signal. Expected share, by group size:\n"
        f"  {shares}"
    )


def _nothing(facts: Facts) -> str:
    """Returns why no arm is proposed: no group of the profile had both outcomes."""
    rate = facts.profile["outcome_rate"]
    prompts, never, always = (
        format_count(int(each)) for each in (len(rate), (rate == 0).sum(), (rate == 1).sum())
    )
    return (
        f"Nothing can be learned here, so no arm is proposed: of {prompts} prompts, "
        f"{never} were never and {always} always solved, none sometimes.\n"
        "Check what the judge reads (profile/rollouts, reward.answer_pattern, "
        "reward.threshold), change the prompts, or warm up the base."
    )


def _nothing_learned(reasons: Mapping[str, str | None]) -> str:
    """Returns why no arm is proposed although groups are mixed: no round had an advantage."""
    return "\n".join(
        [
            "No finished round learned anything, so no arm is proposed; another allocation of "
            "compute would not help:",
            *(
                f"  {name}: no rollout had an advantage, because {why}"
                for name, why in reasons.items()
            ),
            "Check the rewards (rewards/, reward), and what the arms' selection and objective "
            "keep.",
        ]
    )


def _arms(params: Parameters, proposal: Proposal, facts: Facts) -> str:
    """Returns the predicted amounts of every arm and the larger part of the reference's cost."""
    rows = [
        ["arm", "groups", "rollouts", "equal", "sampling", "updates", "profile", "all", "signal"]
    ]
    for arm in proposal.params.arms:
        if proposal.params.rounds_of(arm):
            amounts = predict_arm(proposal.params, arm, facts)
            profile = profile_flops(proposal.params, arm, facts)
            rows.append([arm, *_amounts(amounts, profile, proposal)])
    return "\n".join(
        [
            "ARMS  predicted for all rounds of each; equal: share of groups without signal",
            *_table(rows),
            _dominant(proposal),
            _lengths(facts),
            *_unlike_draws(params, facts),
        ]
    )


def _amounts(amounts: Amounts, profile: int, proposal: Proposal) -> list[str]:
    return [
        f"{amounts.groups:.0f}",
        f"{amounts.rollouts:.0f}",
        format_percent(amounts.uniform_fraction),
        format_flops(amounts.sampling_flops),
        format_flops(amounts.update_flops),
        format_flops(float(profile)) if profile else DASH,
        format_flops(amounts.flops + profile),
        format_percent(amounts.signal / proposal.target.signal),
    ]


def _lengths(facts: Facts) -> str:
    """Returns how long rollouts are expected to be."""
    change = float(facts.in_training.rollouts["steps"].mean() / facts.rollouts["steps"].mean() - 1)
    if not round(100 * change):
        return "Rollouts are expected to be as long as in the profile."
    direction = "longer" if change > 0 else "shorter"
    return (
        f"Rollouts are expected to be {format_percent(abs(change))} {direction} than in the "
        "profile, like its solved ones."
    )


def _dominant(proposal: Proposal) -> str:
    """Returns the larger part of the reference's cost and how to reduce it."""
    target = proposal.target
    share = target.update_flops / target.flops
    if share >= 0.5:
        return (
            f"Updates take {format_percent(share)} of {proposal.reference}'s FLOPs: training on "
            "fewer rollouts saves most (smaller groups,\ndrop_uniform_groups, "
            "keep_extreme_rollouts)."
        )
    return (
        f"Sampling takes {format_percent(1 - share)} of {proposal.reference}'s FLOPs: sampling "
        "fewer rollouts saves most (a choice of prompts,\nskip_uniform_prompts, "
        "reuse_profile_rollouts)."
    )


def _unlike_draws(params: Parameters, facts: Facts) -> list[str]:
    """Returns a remark per arm whose sampling settings differ from those of the profile."""
    profile_draws = draws_of_profile(params)
    differences = {
        name: facts.cost_model.find_decoding_mismatch(draws_of_arm(params, name), profile_draws)
        for name in params.arms
    }
    return [
        f"{name} {difference}: its rates and lengths may differ."
        for name, difference in differences.items()
        if difference
    ]


def _seconds(proposal: Proposal, facts: Facts, rates: Rates | str) -> str:
    """Returns the predicted seconds of every arm, or why there are none."""
    if isinstance(rates, str):
        return f"Seconds are not predicted: {rates}"
    params = proposal.params
    rows = [["arm", "sampling", "updates", "judging", "rest", "profile", "all"]]
    for arm in params.arms:
        if params.rounds_of(arm):
            rounds = len(params.chain(arm)) - 1
            seconds = rates.predict(predict_arm(params, arm, facts), rounds=rounds)
            profile = rates.profile if profile_flops(params, arm, facts) else 0.0
            parts = [seconds.sampling, seconds.updates, seconds.judging, seconds.rest]
            shown = [format_seconds(each) if each else DASH for each in [*parts, profile]]
            rows.append([arm, *shown, format_seconds(seconds.total + profile)])
    return "\n".join(
        [
            "SECONDS  predicted for all rounds of each, at the rates of this workspace",
            *_table(rows),
            "Rest: start-up of the stages, reading and writing. Evaluations are not counted.",
        ]
    )


def _sizings(proposal: Proposal, facts: Facts) -> str:
    """Returns, by group size, the cost of as many groups with signal as the reference has."""
    rows = [["group size", "groups", "prompts", "rates", "equal", "FLOPs", "signal", ""]]
    for each in proposal.by_sizing:
        note = "not enough prompts" if each.shortage > 1 else ""
        rows.append([*_sizing(each, proposal), "<- proposed" if each is proposal.chosen else note])
    reference = proposal.reference
    most = max(each.visits for each in proposal.by_sizing)
    visits = f"each prompt at most {most} times" if most > 1 else "each prompt once"
    return "\n".join(
        [
            f"GROUP SIZES  for {proposal.target.mixed_groups:.0f} groups with both outcomes, as "
            f"{reference} has, {visits}; percent of {reference}",
            *_table(rows),
            "Signal: the expected sum of squares within groups, (G - 1) p (1 - p) each. Smaller "
            "groups have\nnoisier baselines, so the same number of groups with signal carries less "
            "of it. FLOPs count the\nprofile where a curriculum reads it; this advice read "
            f"it too ({format_percent(facts.cost.flops / proposal.target_flops)}).",
            *_remarks(proposal),
        ]
    )


def _remarks(proposal: Proposal) -> list[str]:
    """Returns remarks on missing prompts and on whether a candidate is cheaper."""
    chosen, reference = proposal.chosen, proposal.reference
    most = chosen.flops if chosen else proposal.target_flops
    lacking = [each for each in proposal.by_sizing if each.shortage > 1 and each.window is None]
    cheaper = [each for each in lacking if each.flops < most]
    remarks = []
    if chosen is None:
        remarks.append("No group size has enough prompts.")
    elif chosen.flops >= proposal.target_flops:
        remarks.append(f"No candidate takes fewer FLOPs than {reference}: keep {reference}.")
    if cheaper:
        each = min(cheaper, key=lambda each: each.shortage)
        remarks.append(
            f"With {each.needed} prompts (task.train_prompts), groups of {each.sizing} would take "
            f"{format_percent(each.flops / proposal.target_flops)} of {reference}'s FLOPs."
        )
    return remarks


def _sizing(each: Candidate, proposal: Proposal) -> list[str]:
    rates = "all" if each.window is None else f"{each.window[0]:g} to {each.window[1]:g}"
    return [
        str(each.sizing),
        str(each.groups),
        str(each.available),
        rates,
        format_percent(each.amounts.uniform_fraction),
        format_percent(each.flops / proposal.target_flops),
        format_percent(each.amounts.signal / proposal.target.signal),
    ]


def _comparison(params: Parameters, compared: Sequence[Compared]) -> str:
    """Returns predicted and counted amounts of finished rounds and their sums per arm."""
    rows = [["round", "sampled steps", "trained steps", "equal", "FLOPs"]]
    rows += _by_round_and_arm(params, compared, _amount_pairs)
    return "\n".join(
        [
            "WHAT HAPPENED  predicted / counted, and the relative error",
            *_table(rows),
            "Rounds after an arm's first start from a trained policy. Its rates are not predicted.",
        ]
    )


def _by_round_and_arm(
    params: Parameters, compared: Sequence[Each], cells: Callable[[Sequence[Each]], list[str]]
) -> list[list[str]]:
    """Returns a row per round, then one per arm of several rounds.

    Args:
      cells: Returns the cells of the sum of several rounds.
    """
    rows = [[each.round, *cells([each])] for each in compared]
    for arm in params.arms:
        own = [each for each in compared if params.rounds[each.round].arm == arm]
        if len(own) > 1:
            rows.append([f"all of {arm}", *cells(own)])
    return rows


def _amount_pairs(compared: Sequence[Compared]) -> list[str]:
    predicted = Amounts.of([each.predicted for each in compared])
    actual = Amounts.of([each.actual for each in compared])
    shares = predicted.uniform_fraction, actual.uniform_fraction
    return [
        _with_error(predicted.sampled_steps, actual.sampled_steps, _format_number),
        _with_error(predicted.trained_steps, actual.trained_steps, _format_number),
        _with_error(*shares, format_percent),
        _with_error(predicted.flops, actual.flops, format_flops),
    ]


def _compared_seconds(params: Parameters, compared: Sequence[Compared], rates: Rates) -> str:
    """Returns predicted and measured seconds of finished rounds and their sums per arm."""
    found = compare_seconds(compared, rates)
    lines = []
    if found:
        rows = [["round", "sampling", "updates", "all", "all, of counted amounts"]]
        rows += _by_round_and_arm(params, found, _seconds_pairs)
        lines = [
            "SECONDS  predicted / measured, and the relative error",
            *_table(rows),
            "Of counted amounts: predicted from counted steps and FLOPs, without the errors of "
            "those.",
        ]
    missing = {each.round for each in compared} - {each.round for each in found}
    if missing:
        lines.append(f"Not measured in this workspace: {', '.join(sorted(missing))}.")
    return "\n".join(lines)


def _seconds_pairs(compared: Sequence[ComparedSeconds]) -> list[str]:
    predicted = Seconds.of([each.predicted for each in compared])
    at_counted = Seconds.of([each.at_counted for each in compared])
    measured = Seconds.of([each.measured for each in compared])
    return [
        _with_error(predicted.sampling, measured.sampling, format_seconds),
        _with_error(predicted.updates, measured.updates, format_seconds),
        _with_error(predicted.total, measured.total, format_seconds),
        _with_error(at_counted.total, measured.total, format_seconds),
    ]


def _with_error(predicted: float, actual: float, formatter: Callable[[float], str]) -> str:
    error = relative_error(predicted, actual)
    shown = "" if error is None else f" {100 * error:+4.0f}{SPACE}%"
    return f"{formatter(predicted)} / {formatter(actual)}{shown}"


def _format_number(amount: float) -> str:
    return f"{amount:.0f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns aligned lines: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
