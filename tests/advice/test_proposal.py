"""Laws of the proposed arm: valid, as many groups with signal, and no candidate is cheaper."""

from pathlib import Path
from typing import Any

import pytest
from profiles import synthetic_facts

from benchmarks.workspaces import SHORT_ROLLOUTS
from grpo.advice.prediction import predict_arm, profile_flops
from grpo.advice.proposal import Proposal, propose
from grpo.advice.text import snippet
from grpo.objective.rules import Severity
from grpo.params.parameters import Parameters, read_params
from grpo.params.yaml import dump_yaml, parse_yaml, value_at
from grpo.wiring.checks import findings

ROOT = Path(__file__).parents[2]
REFERENCE = "arms.uniform"
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "penalty": {f"{REFERENCE}.objective": [{"grpo": {"beta": 0.1}}]},
    "rollout ratio": {f"{REFERENCE}.objective": ["gspo"]},
    "pairs, shaped": {
        "reward.unfinished_penalty": 0.5,
        f"{REFERENCE}.curriculum": [
            {"split_at_random": {"phases": 3, "prompts_per_phase": 100}},
            {"fix_group_size": {"rollouts": 2}},
        ],
        f"{REFERENCE}.objective": [{"dr_grpo": {"horizon": 24}}],
    },
    "extremes": {
        f"{REFERENCE}.objective": ["rloo", {"keep_extreme_rollouts": {"keep": 4}}],
    },
    "budget": {f"{REFERENCE}.selection": [{"skip_uniform_prompts": {"prompts": 50}}]},
    "visits": {f"{REFERENCE}.selection": [{"visit_prompts": {"prompts": 20}}]},
    "decay": {
        f"{REFERENCE}.training.schedule": {
            "kind": "cosine",
            "warmup_updates": 4,
            "total_updates": 36,
        },
    },
    "plateau": {
        f"{REFERENCE}.training.iterations_per_round": 12,
        f"{REFERENCE}.training.updates_per_iteration": 1,
        f"{REFERENCE}.training.stop_on_plateau": {"iterations": 5, "tolerance": 0.0},
    },
}


def write_params(tmp_path: Path, changes: dict[str, Any]) -> Path:
    """Writes params.yaml with phases that fit a profile of 300 prompts, and some changes."""
    content = parse_yaml(SHORT_ROLLOUTS.read_text())
    content["arms"]["uniform"]["curriculum"][0]["split_at_random"]["prompts_per_phase"] = 60
    once = {"iterations_per_round": 1, "updates_per_iteration": 12}
    content["arms"]["uniform"]["training"] |= once
    for path, value in changes.items():
        above, _, key = path.rpartition(".")
        value_at(content, above)[key] = value
    file = tmp_path / "params.yaml"
    file.write_text(dump_yaml(content))
    return file


def proposed(file: Path, **profile: Any) -> tuple[Parameters, Proposal]:
    params = read_params(file)
    return params, propose(params, synthetic_facts(**profile))


def with_snippet(file: Path, proposal: Proposal) -> Path:
    """Returns the file with the snippet merged into it."""
    content, new = parse_yaml(file.read_text()), parse_yaml(snippet(proposal))
    assert set(new) == {"arms", "rounds"}
    for section, entries in new.items():
        assert not set(entries) & set(content[section])
        content[section].update(entries)
    file.write_text(dump_yaml(content))
    return file


@pytest.mark.parametrize("name", VARIANTS)
def test_the_snippet_is_an_arm_that_parses_and_is_sound(tmp_path: Path, name: str):
    file = write_params(tmp_path, VARIANTS[name])
    _, proposal = proposed(file)
    assert proposal.chosen is not None
    params = read_params(with_snippet(file, proposal))
    assert params.arms["advised"] == proposal.params.arms["advised"]
    assert params.chain("advised") == ["base", "advised-1", "advised-2", "advised-3"]
    errors = [each for each in findings(params) if each.severity is Severity.ERROR]
    assert errors == []


@pytest.mark.parametrize(
    ("baseline", "others", "drops"),
    [
        ("center_by_group_mean", [], True),
        ("center_by_moving_average", [], False),
        ("center_by_group_mean", [{"add_entropy_bonus": {"weight": 0.01}}], False),
    ],
)
def test_uniform_groups_are_dropped_unless_they_have_a_gradient(
    tmp_path: Path, baseline: str, others: list[Any], drops: bool
):
    clip = {"clip_surrogate": {"low": 0.2, "high": 0.2}}
    objective = [baseline, "average_over_steps", clip, *others]
    file = write_params(tmp_path, {f"{REFERENCE}.objective": objective})
    _, proposal = proposed(file, prior=(50.0, 50.0))  # near one half: no profile is read
    assert proposal.chosen is not None
    assert proposal.chosen.sizing.is_fixed
    dropped = ["drop_uniform_groups"] if drops else []
    assert proposal.params.arms["advised"].objective == [*objective, *dropped]


def test_groups_of_equal_outcomes_stay_if_their_parts_have_scores(tmp_path: Path):
    objective = [
        "sum_later_part_scores",
        "average_over_steps",
        {"clip_surrogate": {"low": 0.2, "high": 0.2}},
    ]
    judges = parse_yaml(SHORT_ROLLOUTS.read_text())["reward"]["judges"]
    changes = {
        "task.notation": "steps",
        "reward.judges": [{**judges[0], "judge": "worked_solution"}],
        f"{REFERENCE}.objective": objective,
    }
    _, proposal = proposed(write_params(tmp_path, changes), prior=(50.0, 50.0))
    assert proposal.params.arms["advised"].objective == objective


def test_a_decay_goes_as_far_as_that_of_the_reference(tmp_path: Path):
    file = write_params(tmp_path, VARIANTS["decay"])
    params, proposal = proposed(file)
    before, after = (params.arms["uniform"].training, proposal.params.arms["advised"].training)
    ratio = after.iterations_per_round * after.updates_per_iteration / 12
    assert before.schedule is not None
    assert after.schedule is not None
    assert after.schedule.total_updates == pytest.approx(36 * ratio, abs=1)
    assert after.schedule.warmup_updates == pytest.approx(4 * ratio, abs=1)


def test_a_second_proposal_has_a_name_of_its_own(tmp_path: Path):
    file = write_params(tmp_path, {})
    first = proposed(file)[1]
    with_snippet(file, first)
    second = proposed(file)[1]
    assert (first.name, second.name) == ("advised", "advised-v2")
    read_params(with_snippet(file, second))


def test_the_arm_has_as_many_groups_with_signal_as_the_reference_at_the_lowest_cost(
    tmp_path: Path,
):
    params, proposal = proposed(write_params(tmp_path, {}))
    chosen, target = proposal.chosen, proposal.target
    assert chosen.amounts.mixed_groups >= target.mixed_groups
    assert chosen.needed <= chosen.available <= 300
    for each in proposal.by_sizing:
        assert each.shortage > 1 or each.flops >= chosen.flops
    # What the curriculum stage will draw is a sample of what was expected.
    facts = synthetic_facts()
    drawn = predict_arm(proposal.params, "advised", facts)
    assert drawn.mixed_groups == pytest.approx(target.mixed_groups, rel=0.1)
    assert drawn.flops == pytest.approx(chosen.amounts.flops, rel=0.15)
    assert params.arms == {name: proposal.params.arms[name] for name in params.arms}


def test_updates_hold_as_many_rollouts_as_those_of_the_reference(tmp_path: Path):
    params, proposal = proposed(write_params(tmp_path, {}))
    reference, arm = params.arms["uniform"].training, proposal.params.arms["advised"].training
    per_update = proposal.target.rollouts / 3 / reference.updates_per_iteration
    assert arm.updates_per_iteration == round(proposal.chosen.amounts.rollouts / 3 / per_update)
    assert arm.learning_rate == reference.learning_rate


@pytest.mark.parametrize(
    ("iterations", "updates"), [(12, 1), (1, 1), (1, 12), (3, 4), (4, 2), (60, 1), (7, 8)]
)
def test_an_on_policy_reference_gets_an_on_policy_proposal(
    tmp_path: Path, iterations: int, updates: int
):
    """Otherwise, the proposal has as many iterations as the reference; both keep their batches."""
    changes = {
        f"{REFERENCE}.training.iterations_per_round": iterations,
        f"{REFERENCE}.training.updates_per_iteration": updates,
    }
    file = write_params(tmp_path, changes)
    _, proposal = proposed(file)
    chosen, training = proposal.chosen, proposal.params.arms["advised"].training
    per_update = proposal.target.rollouts / 3 / (iterations * updates)
    wanted = min(chosen.amounts.rollouts / 3 / per_update, chosen.per_round)
    if updates == 1:
        assert training.updates_per_iteration == 1
        assert training.iterations_per_round == max(1, round(wanted))
    else:
        assert training.iterations_per_round == min(iterations, max(1, round(wanted)))
        assert abs(training.updates_per_iteration - wanted / training.iterations_per_round) <= 1
    total = training.iterations_per_round * training.updates_per_iteration
    assert training.updates_per_audit == total <= chosen.per_round
    errors = [
        each
        for each in findings(read_params(with_snippet(file, proposal)))
        if each.severity is Severity.ERROR
    ]
    assert errors == []


def test_the_profile_counts_for_a_candidate_that_reads_it(tmp_path: Path):
    params, proposal = proposed(write_params(tmp_path, {}))
    facts = synthetic_facts()
    for each in proposal.by_sizing:
        reads = each.window is not None or not each.sizing.is_fixed
        assert each.profile_flops == (facts.cost.flops if reads else 0)
    assert profile_flops(params, "uniform", facts) == 0
    assert profile_flops(params, "sgpo", facts) == facts.cost.flops


def test_too_few_prompts_for_any_size_are_no_arm(tmp_path: Path):
    """Every prompt is in the reference arm, in the largest groups there are."""
    changes = {
        "arms.uniform.curriculum": [
            {"split_at_random": {"phases": 3, "prompts_per_phase": 100}},
            {"fix_group_size": {"rollouts": 64}},
        ]
    }
    _, proposal = proposed(write_params(tmp_path, changes))
    assert proposal.chosen is None
    assert all(each.shortage > 1 for each in proposal.by_sizing)


def test_a_reference_that_visits_prompts_again_gets_such_an_arm(tmp_path: Path):
    """300 prompts, each visited about five times in groups of 16: too many for pairs of each."""
    changes = {
        f"{REFERENCE}.selection": [{"visit_prompts": {"prompts": 40}}],
        f"{REFERENCE}.training.iterations_per_round": 12,
        f"{REFERENCE}.training.updates_per_iteration": 1,
    }
    _, proposal = proposed(write_params(tmp_path, changes))
    chosen, arm = proposal.chosen, proposal.params.arms["advised"]
    assert chosen.visits == 5
    assert chosen.available < chosen.groups <= 5 * chosen.available
    assert chosen.needed == -(-chosen.groups // chosen.visits) <= chosen.available
    predicted = predict_arm(proposal.params, "advised", synthetic_facts())
    assert predicted.mixed_groups == pytest.approx(proposal.target.mixed_groups, rel=0.1)
    assert predicted.flops == pytest.approx(chosen.amounts.flops, rel=0.15)
    (visits,) = arm.selection
    iterations = 3 * arm.training.iterations_per_round
    surplus = visits["visit_prompts"]["prompts"] * iterations - chosen.groups
    assert 0 <= surplus < iterations
    assert {proposal.params.rounds[f"advised-{each}"].phase for each in (1, 2, 3)} == {1}


def test_a_profile_without_any_signal_has_an_answer(tmp_path: Path):
    _, proposal = proposed(write_params(tmp_path, {}), prior=(0.001, 50.0))
    assert proposal.target.uniform_fraction > 0.9
