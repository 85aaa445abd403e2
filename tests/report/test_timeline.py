"""The figure of what samplers and trainer did when."""

from dataclasses import asdict
from pathlib import Path

from finished_run import write_later_iteration

from grpo.params.parameters import Parameters
from grpo.report.figures import draw_timeline
from grpo.report.reading import read_run
from grpo.report.seconds import Span, read_usages, timeline
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.usage import Usage

ROUND = "sgpo-1"


def test_parts_are_noted_with_their_start_and_their_end_also_of_work_beside():
    usage = Usage()
    beside = usage.beside()
    with usage.part("update"), beside.part("sampling"):
        pass
    (inner, *within), (outer, *around) = usage.spans
    assert (inner, outer) == ("sampling", "update")
    assert around[0] <= within[0] <= within[1] <= around[1]
    assert usage.seconds_by_part.keys() == {"update"}


def test_a_timeline_starts_with_the_first_work_and_leaves_out_waiting():
    spans = [("start", 0.0, 1.0), ("load", 1.0, 2.0), ("read", 2.5, 3.0), ("sampling", 3.0, 5.0)]
    spans += [("update", 3.0, 4.0), ("waiting", 4.0, 5.0), ("weights", 5.0, 5.5)]
    assert timeline(Usage(spans=spans)) == [
        Span("other", 0.0, 0.5),
        Span("sampling", 0.5, 2.5),
        Span("update", 0.5, 1.5),
        Span("weights", 2.5, 3.0),
    ]


def test_rounds_with_iterations_that_were_measured_are_drawn(
    artifacts: Path, params: Parameters
) -> None:
    usage = Usage(spans=[("sampling", 1.0, 2.0), ("update", 2.0, 3.0)])
    write_json(Path(f".runs/train@{ROUND}.json"), asdict(usage))
    once = read_run(artifacts, params)
    assert draw_timeline(once, read_usages(params)) is None
    write_later_iteration(artifacts, ROUND, 1)
    run = read_run(artifacts, params)
    assert draw_timeline(run, {}) is None
    panel = draw_timeline(run, read_usages(params))
    assert panel is not None
    for each in (f"{ROUND}, samplers", f"{ROUND}, trainer", "sampling", "update"):
        assert each in panel.svg
    assert "judging" not in panel.svg
