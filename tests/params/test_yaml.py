"""params.yaml means here what it means to DVC, and is refused in one line if it cannot."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dvc.utils.serialize import YAMLFileCorruptedError
from dvc.utils.serialize import parse_yaml as parse_as_dvc
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo.errors import ArtifactError, ParameterError
from grpo.params.parameters import read_params
from grpo.params.recipes import read_content
from grpo.params.yaml import dump_yaml, find_odd_value, parse_yaml

RECIPE = (Path(__file__).parents[2] / "recipes" / "smoke.yaml").read_text()
SCALARS = st.text(alphabet="0123456789eE.+-_:xob~ynTfaNi'\" <=!#", min_size=1) | st.text()
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=200)
    | st.sampled_from(["1e-5", "010", "1:30", "yes", "null", "~", "<<", "=", "2020-01-01", "0o7"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc1-.:", min_size=1), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(SCALARS)
@example("1e-5")
@example("1e-05")
@example("010")
@example("1:30")
@example("yes")
@example("1_000")
def test_every_spelling_means_what_it_means_to_dvc(spelling: str):
    text = f"a: {spelling}\n"
    try:
        expected = parse_as_dvc(text, "params.yaml")
    except (YAMLFileCorruptedError, ValueError, LookupError, TypeError):
        with pytest.raises(ArtifactError):
            parse_yaml(text)
    else:
        assert repr(parse_yaml(text) or {}) == repr(expected)


@settings(deadline=None, max_examples=50)
@given(PLAIN, st.booleans())
def test_what_is_written_is_read_back_here_and_by_dvc(value: object, compact: bool):
    text = dump_yaml({"a": value}, compact=compact)
    assert find_odd_value({"a": value}) is None
    assert parse_yaml(text) == parse_as_dvc(text, "params.yaml") == {"a": value}


@pytest.mark.parametrize(("spelling", "rate"), [("1e-5", 1e-5), ("1e-05", 1e-5), ("3E-6", 3e-6)])
def test_a_learning_rate_may_be_written_as_python_and_dvc_write_it(
    tmp_path: Path, spelling: str, rate: float
):
    file = tmp_path / "params.yaml"
    file.write_text(re.sub(r"learning_rate: .*", f"learning_rate: {spelling}", RECIPE))
    params = read_params(file)
    assert {arm.training.learning_rate for arm in params.arms.values()} == {rate}


def test_anchors_and_merge_keys_are_read(tmp_path: Path):
    file = tmp_path / "params.yaml"
    arm = RECIPE.index("  sgpo:\n")
    file.write_text(
        RECIPE[:arm]
        + RECIPE[arm:]
        .replace("  sgpo:\n", "  sgpo: &sgpo\n", 1)
        .replace("rounds:\n", "  other:\n    <<: *sgpo\n    selection: []\nrounds:\n")
    )
    params = read_params(file)
    assert params.arms["other"] == params.arms["sgpo"].model_copy(update={"selection": []})


def append(text: str) -> Callable[[Path], None]:
    return lambda file: file.write_text(RECIPE + text)


def make_pipe(file: Path) -> None:
    os.mkfifo(file)


def write(content: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (append("seed: 5\n"), r"seed is a duplicate key, in lines \d+ and \d+; remove one"),
        (append("extra: {a: {b: 1, b: 1}}\n"),
         r"extra.a.b is a duplicate key, in lines (\d+) and \1;"),
        (append("extra: [{'a': 1, a: 2}]\n"), r"extra\[0\].a is a duplicate key"),
        (append("extra: &x {a: [*x]}\n"), r"extra.a\[0\] is an alias of its own parent"),
        (append("extra: &x [[*x]]\n"), r"extra\[0\]\[0\] is an alias of its own parent"),
        (append("l0: &l0 [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
            f"l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 8)}]\n" for n in range(8))),
         "the file must have at most 100000 values"),
        (append("m0: &m0 {a: 1}\n" + "".join(
            f"m{n + 1}: &m{n + 1} {{<<: [{', '.join([f'*m{n}'] * 10)}]}}\n" for n in range(8))),
         "the file must have at most 100000 values"),
        (append("extra: " + "[" * 200_000 + "]" * 200_000), "must be YAML with at most 100 levels"),
        (append(f"extra: {'9' * 5000}\n"), r"must be YAML, Exceeds the limit"),
        (append(f"extra: {'9' * 30}\n"), r"extra must lie within 64 bits"),
        (append("extra: {a: .nan}\n"), r"extra.a must be a finite number, got nan"),
        (append("extra: [1, -.inf]\n"), r"extra\[1\] must be a finite number, got -inf"),
        (append("extra: 1e400\n"), r"extra must be a finite number, got inf"),
        (append("extra: 2020-01-01\n"), r"extra must be .* the date 2020-01-01; put .* in quotes"),
        (append("extra: !!binary aGk=\n"), r"extra must be .* bytes"),
        (append("5: a\n"), r"the file has the key 5, must have texts; put it in quotes"),
        (append("extra: {null: a}\n"), r"extra has the key None, must have texts"),
        (append("extra: =\n"), r"must be YAML, could not determine a constructor"),
        (append("extra: !!python/object:os.x {}\n"), r"must be YAML, could not determine"),
        (append("--- {}\n"), r"must be YAML, expected a single document"),
        (write(b""), r"must hold parameters by name, got None"),
        (write(b"- 1\n"), r"must hold parameters by name, got \[1\]"),
        (write(b"\x89PNG\r\n\x1a\n\x00\x00"), r"must be YAML in UTF-8"),
        (write(b"seed: 1\n\x00\x01\n"), r"must be YAML, unacceptable character"),
        (write(RECIPE.encode("utf-16")), r"must be YAML in UTF-8"),
        (Path.mkdir, r"must be a YAML file, is a directory; correct the path"),
        (make_pipe, r"must be a YAML file, is a pipe or device; correct the path"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_parameters_is_refused_in_one_line(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
):
    file = tmp_path / "params.yaml"
    spoil(file)
    with pytest.raises(ParameterError, match=rf"^{re.escape(str(file))}: {message}") as raised:
        read_params(file)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_byte_order_mark_and_line_ends_of_windows_change_nothing(tmp_path: Path):
    file, marked = tmp_path / "params.yaml", tmp_path / "marked.yaml"
    file.write_text(RECIPE)
    marked.write_bytes(b"\xef\xbb\xbf" + RECIPE.replace("\n", "\r\n").encode())
    assert read_content(marked) == read_content(file)


def test_a_tab_is_named_with_its_line():
    with pytest.raises(ArtifactError, match="line 3 is indented by a tab; use spaces"):
        parse_yaml("a: 1\nb:\n\tc: 2\n")
