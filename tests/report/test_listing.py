"""Laws of `grpo rollouts`: each rollout with its prompt, reference, reward and status."""

import re
from pathlib import Path

import pytest
from finished_run import HOSTILE, write_later_iteration

from grpo.errors import ParameterError
from grpo.modalities import find_modality
from grpo.params.parameters import Parameters
from grpo.report.listing import list_rollouts
from grpo.runtime.artifacts.tables import ROLLOUTS, read_table, write_table


def test_a_rollout_is_shown_with_what_was_asked_and_judged(
    artifacts: Path, params: Parameters
) -> None:
    """Four rollouts: "#", a hostile text that could not be parsed, "2" and "3" of reference 2."""
    reward = params.reward.model_copy(update={"answer_pattern": r"(\d)$"})
    params = params.model_copy(update={"reward": reward})
    text = list_rollouts(artifacts, params, "sgpo-1", limit=20)
    assert text.startswith("sgpo-1: 4 rollouts (1 right, 3 not), 4 shown\n\nnever (f, iteration")
    assert text.endswith(
        "half (f, iteration 1 of 1)\n"
        "  prompt      trained\n"
        "  reference   2\n"
        "  /0          right, reward 1.000, scored\n"
        "  text        2\n"
        "  judge read  2\n"
        "  /1          wrong, reward 0.000, scored\n"
        "  text        3\n"
        "  judge read  3"
    )
    assert "wrong, reward 0.000, unparsable, cut off\n" in text
    assert text.count("(no answer found)") == 2
    assert HOSTILE not in text  # no escape sequence reaches the terminal
    assert r"\x1b[31m" in text


def test_only_the_rollouts_asked_for_are_shown(artifacts: Path, params: Parameters) -> None:
    write_later_iteration(artifacts, "sgpo-1", 1)

    def shown(**chosen: object) -> int:
        return len(re.findall("right, reward|wrong, reward", listed(**chosen)))

    def listed(**chosen: object) -> str:
        return list_rollouts(artifacts, params, "sgpo-1", **{"limit": 20, **chosen})

    assert shown() == 4 + 4
    assert (shown(kind="right"), shown(kind="wrong")) == (1 + 2, 3 + 2)
    assert "half (f, iteration 2 of 2)" in listed()
    assert shown(limit=3) == 3
    assert listed(limit=3).startswith("sgpo-1: 8 rollouts (3 right, 5 not), 3 shown of 8; --limit")
    assert shown(family="f") == 8
    assert max(map(len, listed().splitlines())) <= 100


def test_long_texts_are_wrapped_and_their_lines_kept(artifacts: Path, params: Parameters) -> None:
    path = artifacts / "rollouts/sgpo-1/table.parquet"
    table = read_table(path, ROLLOUTS)
    table["text"] = ["first\nsecond", "word " * 100, "q" * 250, ""]
    write_table(table, path, ROLLOUTS)
    lines = list_rollouts(artifacts, params, "sgpo-1", limit=20).splitlines()
    assert "  text        first" in lines
    assert f"{'second':>20}" in lines
    assert max(map(len, lines)) == 100
    assert sum(line.count("word") for line in lines) == 100
    assert sum(line.count("q") for line in lines) == 250


def test_media_are_named_and_not_printed(artifacts: Path, params: Parameters) -> None:
    class Drawing:
        modality = find_modality("denoising")
        reward = params.reward.model_copy(update={"answer_pattern": None})

    assert list_rollouts(artifacts, Drawing, "sgpo-1", limit=20).count("not text, and not st") == 4
    place = artifacts / "rollouts/sgpo-1/tensors.safetensors"
    place.touch()
    text = list_rollouts(artifacts, Drawing, "sgpo-1", limit=20)
    joined = re.sub(r"\s+", "", text)
    assert re.sub(r"\s+", "", f"not text: row 3 of {place}") in joined
    assert "judge read" not in text


@pytest.mark.parametrize(
    ("name", "family", "message"),
    [
        ("nope", None, "nope: is no round here; known: sgpo-1, uniform-1, uniform-2"),
        ("sgpo-1", "nope", "nope: is no family here; known: f"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(
    artifacts: Path, params: Parameters, name: str, family: str | None, message: str
) -> None:
    with pytest.raises(ParameterError, match=f"^{message}$"):
        list_rollouts(artifacts, params, name, family=family, limit=1)
