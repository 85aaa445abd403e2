"""Laws of `grpo summary`: its numbers are those of the page and of .runs/, in two sentences."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from finished_run import SUCCESSES, write_later_iteration

from grpo.__main__ import main
from grpo.params.parameters import JudgeParams, Parameters
from grpo.report.numbers import compute_numbers, metrics
from grpo.report.reading import read_run
from grpo.report.seconds import PARTS, stages_of
from grpo.report.summary import describe, summarize
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.tables import EVALUATION, read_table, write_table
from grpo.runtime.artifacts.usage import USAGE, Usage
from grpo.wiring.allocation import reads_profile

PART_OF = {
    "start": "start_up",
    "load": "start_up",
    "sampling": "sampling",
    "simulation": "sampling",
    "judging": "judging",
    "update": "update",
    "weights": "weights",
    **dict.fromkeys(("save", "checkpoint", "gradients"), "other"),
}


def write_usages(params: Parameters) -> None:
    """Writes another time for every part of every stage, and half a second of nothing known."""
    for number, stage in enumerate(stages_of(params)):
        parts = {part: 1.0 + number / 4 + i / 8 for i, part in enumerate(PART_OF)}
        usage = Usage(seconds=sum(parts.values()) + 0.5, seconds_by_part=parts)
        write_json(USAGE / f"{stage}.json", asdict(usage))


def stages_behind(params: Parameters, arm: str) -> list[str]:
    rounds = params.chain(arm)[1:]
    paid = [f"{stage}@{name}" for name in rounds for stage in ("rollout", "score", "train")]
    return [*(["profile"] if reads_profile(params, arm) else []), *paid]


def test_seconds_of_a_summary_are_those_of_the_stages(artifacts: Path, params: Parameters) -> None:
    write_usages(params)
    described = describe(artifacts, params)
    for arm, found in described["arms"].items():
        files = [read_json(USAGE / f"{each}.json") for each in stages_behind(params, arm)]
        expected = dict.fromkeys(PARTS, 0.0)
        for each in files:
            for part, seconds in each["seconds_by_part"].items():
                expected[PART_OF[part]] += seconds
            expected["other"] += 0.5
        seconds = found["seconds"]
        assert list(seconds) == [*PARTS, "total"]
        assert list(PARTS) == ["start_up", "sampling", "judging", "update", "weights", "other"]
        assert {part: seconds[part] for part in PARTS} == pytest.approx(expected)
        assert seconds["total"] == pytest.approx(sum(each["seconds"] for each in files))
        assert seconds["total"] == pytest.approx(sum(seconds[part] for part in PARTS))
        assert found["stages_without_seconds"] == []


def test_a_summary_for_programs_adds_up(artifacts: Path, params: Parameters) -> None:
    for index in (1, 2):
        write_later_iteration(artifacts, "sgpo-1", index)
    described, run = describe(artifacts, params), read_run(artifacts, params)
    shown = metrics(run, compute_numbers(run))
    assert described["reference"] == "uniform"
    for arm, found in described["arms"].items():
        assert list(found["mean_at_k"]) == params.chain(arm)
        assert found["gain_over_base"]["value"] == shown["arms"][arm]["gain_over_base"]["value"]
        assert found["other_gains_over_base"].keys() == {"greedy", "pass_at_k"}
        for name, score in found["mean_at_k"].items():
            assert score["value"] == pytest.approx(sum(SUCCESSES[name]) / 16)
        flops = found["flops"]
        assert flops["total"] == flops["profile"] + flops["sampling"] + flops["update"]
        paid = shown["arms"][arm]["cost"]
        assert flops["total"] == paid["flops"]
        assert found["sampled_steps"] == paid["sampled_steps"]
        assert found["trained_steps"] == paid["trained_steps"]
        rounds = params.chain(arm)[1:]
        assert found["updates"] == sum(len(run.updates[name]) for name in rounds)
    assert described["arms"]["uniform"]["iterations"] == 2
    assert described["arms"]["sgpo"]["iterations"] == 3
    assert described["arms"]["sgpo"]["flops"]["sampling"] == 30 + 2 * 3


def test_the_agreement_of_judges_is_the_correlation_over_prompts(
    artifacts: Path, judged: Parameters
) -> None:
    others = [JudgeParams(judge="exact", model=None, score_range=None)]
    evaluation = judged.evaluation.model_copy(update={"judges": others})
    params = judged.model_copy(update={"evaluation": evaluation})
    path = artifacts / "evaluations" / "sgpo-1.parquet"
    table = read_table(path, EVALUATION)
    # Means of both are 0.5; deviations .3 -.1 -.1 -.1 and .3 .3 -.3 -.3: 0.12 / sqrt(0.12 * 0.36).
    table["score.ocr"], table["score.exact"] = [0.8, 0.4, 0.4, 0.4], [0.8, 0.8, 0.2, 0.2]
    write_table(table, path, EVALUATION)
    arms = describe(artifacts, params)["arms"]
    assert arms["sgpo"]["correlations"] == {"ocr and exact": pytest.approx(0.577350)}
    write_table(table.assign(**{"score.ocr": 0.5}), path, EVALUATION)
    assert describe(artifacts, params)["arms"]["sgpo"]["correlations"] == {"ocr and exact": None}


def test_a_stage_without_seconds_is_named_and_compute_is_compared(
    artifacts: Path, params: Parameters
) -> None:
    write_usages(params)
    (USAGE / "train@uniform-2.json").unlink()
    described = describe(artifacts, params)
    uniform, sgpo = (described["arms"][arm] for arm in ("uniform", "sgpo"))
    assert (uniform["seconds"], uniform["stages_without_seconds"]) == (None, ["train@uniform-2"])
    assert sgpo["seconds"]["total"] > 0
    # 100 of 200 FLOPs; 0.75 is reached at 90, as test_saving_is_read_off_the_curves derives.
    assert described["saved"] == (
        "Saved: sgpo took 100 FLOP, 50 % less compute than uniform (200 FLOP), and reached "
        "uniform's final mean@4 after 90 FLOP instead of 200 FLOP (not all stages were timed here)."
    )


def test_a_summary_says_in_two_sentences_what_was_learned_and_saved(
    artifacts: Path, params: Parameters
) -> None:
    for stage in stages_of(params):
        write_json(USAGE / f"{stage}.json", asdict(Usage(seconds=10.0)))
    write_json(USAGE / "profile.json", asdict(Usage(seconds=6.0)))
    text = " ".join(summarize(artifacts, params).split())
    assert (
        "Learned: mean@4 of the base changed with uniform by +0.500 and with sgpo by +0.625; too "
        "few prompts to judge (4)." in text
    )
    # uniform: 60 s. sgpo: 0.25 at 6 s, 0.875 at 36 s: 0.75 at 6 + 0.8 * 30 = 30 s.
    assert (
        "Saved: sgpo took 36.0 s, 40 % less time than uniform (1 min 00 s), and reached "
        "uniform's final mean@4 after 30.0 s instead of 1 min 00 s. arm" in text
    )
    arms = describe(artifacts, params)["arms"]
    assert [each["seconds_to_reference"] for each in arms.values()] == [None, 30.0]


def test_without_another_arm_nothing_is_relative(artifacts: Path, params: Parameters) -> None:
    rounds = {name: each for name, each in params.rounds.items() if each.arm == "uniform"}
    alone = params.model_copy(update={"rounds": rounds})
    write_usages(alone)
    assert ", there is no other arm." in describe(artifacts, alone)["saved"].replace(";", ",")


def test_with_enough_prompts_numbers_have_intervals(
    artifacts: Path, params: Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = describe(artifacts, params)["arms"]["uniform"]["mean_at_k"]["uniform-1"]
    assert (few["low"], few["high"]) == (None, None)
    monkeypatch.setattr("grpo.report.verdict.LEAST_PROMPTS", 4)
    described = describe(artifacts, params)
    arm = described["arms"]["uniform"]
    score = arm["mean_at_k"]["uniform-1"]
    assert (score["low"], score["high"]) == pytest.approx((0.4, 0.6))
    # Two of the four prompts, whose greedy rollouts were right before, gain nothing.
    greedy = arm["other_gains_over_base"]["greedy"]
    assert greedy["value"] == 0.5
    assert greedy["low"] < 0.5 < greedy["high"]
    gain = f"+0.500 [{greedy['low']:+.3f}, {greedy['high']:+.3f}]"
    assert f"greedy 0.250 0.750 {gain}" in " ".join(summarize(artifacts, params).split())
    assert "with uniform by +0.500 (+0.500 to +0.500, significant)" in described["learned"]


def test_a_summary_fits_a_terminal_and_begins_with_sentences(
    artifacts: Path, params: Parameters
) -> None:
    """Names of arms have up to 64 characters; the path of the page may be longer."""
    long = {"uniform": "u" * 64, "sgpo": "s" * 64}
    arms = {long[name]: each for name, each in params.arms.items()}
    rounds = {
        name: each.model_copy(update={"arm": long[each.arm]})
        for name, each in params.rounds.items()
    }
    renamed = params.model_copy(update={"arms": arms, "rounds": rounds})
    for each in (params, renamed):
        *lines, page = summarize(artifacts, each).splitlines()
        assert lines[0].startswith("Learned: ")
        assert page.startswith("report: ")
        assert max(map(len, lines)) <= 100
        table = lines[lines.index("") + 1 : -1]
        assert [line.split()[:2] for line in table[1::3]] == [
            [name if each is params else f"{name[:49]}…", "mean@4"] for name in each.arms
        ]


def test_the_command_prints_json_alone(
    artifacts: Path,
    params: Parameters,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    from grpo.report.provenance import CompletedRun

    ran = CompletedRun(params=params, banners=[], stamps=[], outdated_marks=[])
    monkeypatch.setattr("grpo.report.provenance.find_completed_run", lambda: ran)
    monkeypatch.setattr(sys, "argv", ["grpo", "summary", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    warnings = printed.pop("warnings")
    assert ended.value.code == 0
    assert printed == describe(artifacts, params)
    assert any(each.startswith("Too few evaluation prompts: ") for each in warnings)
