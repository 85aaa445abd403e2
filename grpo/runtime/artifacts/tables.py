"""Schemas of all tables of the pipeline, and validated reading and writing of parquet."""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pandera.pandas as pa
import pyarrow as arrow
import pyarrow.parquet as parquet

from grpo.errors import ArtifactError, brief
from grpo.runtime.artifacts.files import atomic_path, require_plain, write_bytes
from grpo.runtime.artifacts.media import is_png

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)  # training computes in float32
# Names of schemas with digests of files that satisfy them: this process has checked their contents.
_VALID: set[tuple[str, bytes]] = set()
LARGEST_GROUPS = 10**9  # bound on the groups of a table
LARGEST_COUNT = 10**30  # bound on FLOPs and steps, far above any run
# Names of the files of rollouts, and of those of an iteration after the first.
TABLE, TENSORS, SUMMARY = "table.parquet", "tensors.safetensors", "summary.json"
ROLLOUTS_FOLDER, REWARDS_FILE = "rollouts", "rewards.parquet"
STATUSES = ("scored", "unparsable", "timed_out", "failed", "unanswered")

_finite = pa.Check(lambda column: np.isfinite(column), name="finite", error="be finite")
_in_float32 = pa.Check.in_range(
    -LARGEST_FLOAT32,
    LARGEST_FLOAT32,
    error="be finite in float32",
)
_parts = pa.Check(
    lambda each: _are_parts(each),
    element_wise=True,
    error="be JSON [[end, score], ...], ends rising from 1 and scores in [0, 1]",
)
_filled = pa.Check(lambda column: column.str.len() > 0, error="not be empty")
_fraction = pa.Check.in_range(0, 1, error="be in [0, 1]")
_image = pa.Check(
    lambda each: each == b"" or is_png(each), element_wise=True, error="be PNG or no bytes"
)
SCORED, UNSCORED = "scored", "unscored"
SCORE = "score."  # begins the names of columns with a judge's scores; a judge's name follows
PARTS = "parts"
GREEDY_SCORE = "greedy_score."  # the same for the greedy rollouts of an evaluation
FIRST_ANSWER, FIRST_SCORE = "first_answer", "first_score"
FIRST_TEXT, FIRST_OUTCOME = "first_text", "first_outcome"
PROMPT_WEIGHT = "prompt_weight"
PROFILED = "profile_rollouts"
ALLOCATION_RECORD = "allocation.json"  # what an allocation expected and what happened


def _at_least(low: int) -> pa.Check:
    return pa.Check.ge(low, error=f"be >= {low}")


def _schema(name: str, key: str, columns: dict[str, pa.Column]) -> pa.DataFrameSchema:
    """Returns a strict schema whose first column identifies the row in messages."""
    identity = {key: pa.Column(str, _filled, unique=True)}
    return pa.DataFrameSchema({**identity, **columns}, strict=True, ordered=True, name=name)


def _scores(prefix: str) -> dict[str, pa.Column]:
    """Returns the last columns of a schema: any number of columns with the scores of a judge."""
    column = pa.Column("float64", [_finite, _fraction], regex=True, required=False)
    return {f"^{re.escape(prefix)}": column}


def _columns(frame: pd.DataFrame, schema: pa.DataFrameSchema) -> list[str]:
    """Returns the names of a schema's columns, the optional ones as the table has them."""
    found: list[str] = []
    for name, column in schema.columns.items():
        if column.regex:
            found += [str(each) for each in frame if re.match(name, str(each))]
        elif column.required or name in frame:
            found.append(name)
    return found


PROMPTS = _schema(
    "prompts",
    "prompt_id",
    {
        "family": pa.Column(str, _filled),
        "prompt": pa.Column(str, _filled),
        "answer": pa.Column(str),
        "entry": pa.Column(str),  # JSON: additional input of the judge
    },
)
WARMUP = _schema(
    "warmup",
    "prompt_id",
    {
        "family": pa.Column(str, _filled),
        "prompt": pa.Column(str, _filled),
        "solution": pa.Column(str, _filled),
    },
)
PROFILE = _schema(
    "profile",
    "prompt_id",
    {
        "family": pa.Column(str, _filled),
        "rollouts": pa.Column("int64", _at_least(0)),  # that were judged
        "successes": pa.Column("int64", _at_least(0)),
        # Null if no rollout was judged.
        "outcome_rate": pa.Column("float64", _fraction, nullable=True),
        "mean_steps": pa.Column("float64", [_finite, _at_least(0)], nullable=True),
        # The mean of the successes; null if there is none.
        "solved_steps": pa.Column("float64", [_finite, _at_least(0)], nullable=True),
    },
)
CURRICULUM = _schema(
    "curriculum",
    "prompt_id",
    {
        "family": pa.Column(str, _filled),
        "phase": pa.Column("int64", _at_least(1)),
        "position": pa.Column("int64", _at_least(0)),  # order within the phase
        # The group's size, if a step of the curriculum sets it.
        "rollouts": pa.Column("int64", _at_least(2), required=False),
        "outcome_rate": pa.Column("float64", _fraction, nullable=True),  # null: no profile
        # Rollouts of the profile behind the rate, if the arm's selection counts them.
        PROFILED: pa.Column("int64", _at_least(1), required=False),
    },
)
ROLLOUTS = _schema(
    "rollouts",
    "rollout_id",
    {
        "prompt_id": pa.Column(str, _filled),
        "group": pa.Column("int64", _at_least(0)),
        "text": pa.Column(str),
        "steps": pa.Column("int64", _at_least(0)),  # length of the rollout: steps with a log-prob
        "is_finished": pa.Column(bool),  # not truncated by the step limit
        # If the arm revises first answers: that of the group, null if it had none; its score, null
        # if the group was not sampled from it.
        FIRST_ANSWER: pa.Column(str, nullable=True, required=False),
        FIRST_SCORE: pa.Column("float64", _fraction, nullable=True, required=False),
        # If prompts were drawn with known probabilities: their inverse, in units of the mean.
        PROMPT_WEIGHT: pa.Column("float64", [_finite, _at_least(0)], required=False),
    },
)
ALLOCATION = _schema(
    "allocation",
    "prompt_id",
    {
        "rollouts": pa.Column("int64", _at_least(0)),  # 0: the prompt is not sampled
        "alpha": pa.Column("float64", [_finite, _at_least(0)]),  # of the posterior of its rate
        "beta": pa.Column("float64", [_finite, _at_least(0)]),
        "cost": pa.Column("float64", [_finite, _at_least(0)], nullable=True),  # expected
        "chance": pa.Column("float64", _fraction, nullable=True),  # of inclusion, if it is known
        "weight": pa.Column("float64", [_finite, _at_least(0)]),  # of the prompt, 1 on average
    },
)
REWARDS = _schema(
    "rewards",
    "rollout_id",
    {
        "prompt_id": pa.Column(str, _filled),
        "outcome": pa.Column("float64", [_finite, _fraction]),
        "reward": pa.Column("float64", [_finite, _in_float32]),
        "status": pa.Column(str, pa.Check.isin(STATUSES, error=f"be one of {STATUSES}")),
        "detail": pa.Column(str),  # the judge's error or return value, if not scored
        # If a judge scores parts of texts: JSON [[end, score], ...], end in characters of the text.
        PARTS: pa.Column(str, _parts, required=False),
        **_scores(SCORE),  # if there are several judges
    },
)
CREDIT = _schema(
    "credit",
    "rollout_id",
    {
        "prompt_id": pa.Column(str, _filled),
        "update": pa.Column("int64", _at_least(0)),
        "advantage": pa.Column("float64", _finite),
        "weight": pa.Column("float64", [_finite, _at_least(0)]),  # summed over steps
        "trained_steps": pa.Column("int64", _at_least(0)),
    },
)
EVALUATION = _schema(
    "evaluation",
    "prompt_id",
    {
        "family": pa.Column(str, _filled),
        "greedy": pa.Column("float64", _fraction, nullable=True),  # null: no greedy decoding
        "rollouts": pa.Column("int64", _at_least(1)),
        "successes": pa.Column("int64", _at_least(0)),
        # The prompt's first sampled rollout: what the judge read, and its outcome.
        FIRST_TEXT: pa.Column(str, required=False),
        FIRST_OUTCOME: pa.Column("float64", [_finite, _fraction], required=False),
        # Means over the prompt's rollouts, if there are several judges.
        **_scores(GREEDY_SCORE),
        **_scores(SCORE),
    },
)
EVALUATION_SAMPLES = _schema(
    "evaluation samples",
    "rollout_id",
    {
        "prompt_id": pa.Column(str, _filled),
        "family": pa.Column(str, _filled),
        "prompt": pa.Column(str, _filled),
        "text": pa.Column(str),  # the judge's input: generated, or read from the image by OCR
        "image": pa.Column(object, _image),  # PNG; empty if rollouts are text
        "outcome": pa.Column("float64", [_finite, _fraction]),
        "reward": pa.Column("float64", [_finite, _fraction]),  # before reward shaping
        **_scores(SCORE),
    },
)


class _Law(NamedTuple):
    """A constraint across the columns of a row."""

    column: str
    rule: str  # after "must be"
    holds: Callable[[pd.DataFrame], "pd.Series[bool]"]


def _are_same(given: "pd.Series[float]", wanted: "pd.Series[float]") -> "pd.Series[bool]":
    return (given == wanted) | (given.isna() & wanted.isna())


def _one_to_one(frame: pd.DataFrame) -> "pd.Series[bool]":
    """Returns which rows keep groups and prompts one-to-one, compared with the first rows."""
    of_group = frame.groupby("group")["prompt_id"].transform("first")
    of_prompt = frame.groupby("prompt_id")["group"].transform("first")
    return (of_group == frame["prompt_id"]) & (of_prompt == frame["group"])


def _has_first_answer_of_group(frame: pd.DataFrame) -> "pd.Series[bool]":
    """Returns which rows have the first answer and score of their group, a score with an answer."""
    if FIRST_SCORE not in frame:
        return pd.Series(True, index=frame.index)
    found = frame[[FIRST_ANSWER, FIRST_SCORE]].astype(object)
    found = found.where(found.notna(), "")
    starts = pd.Series(range(len(frame))).groupby(frame["group"].to_numpy()).transform("first")
    of_group = found.iloc[starts].set_axis(frame.index)
    return (found == of_group).all(axis=1) & (
        frame[FIRST_SCORE].isna() | frame[FIRST_ANSWER].notna()
    )


def _is_object(text: str) -> bool:
    """Returns whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _are_parts(text: str) -> bool:
    """Returns whether a text is a cell of the column PARTS."""
    try:
        found = json.loads(text)
        ends = [end for end, score in found if is_count(end) and type(score) in (int, float)]
        is_fraction = all(0 <= score <= 1 for _, score in found)
    except (TypeError, ValueError, RecursionError):
        return False
    is_list = isinstance(found, list) and len(ends) == len(found)
    return is_list and is_fraction and all(a < b for a, b in zip([0, *ends], ends))


def member_ids(frame: pd.DataFrame) -> "pd.Series[str]":
    """Returns the rollout ids of a complete table, in the order of sampling."""
    member = frame.groupby("prompt_id").cumcount()
    return frame["prompt_id"] + "/" + member.astype(str)


_FEW_SUCCESSES = _Law(
    "successes", "at most rollouts", lambda frame: frame["successes"] <= frame["rollouts"]
)
LAWS = {
    PROFILE.name: (
        _FEW_SUCCESSES,
        _Law(
            "outcome_rate",
            "successes / rollouts",
            lambda frame: _are_same(frame["outcome_rate"], frame["successes"] / frame["rollouts"]),
        ),
        _Law(
            "solved_steps",
            "a number if there are successes, otherwise null",
            lambda frame: frame["solved_steps"].notna() == (frame["successes"] > 0),
        ),
    ),
    EVALUATION.name: (_FEW_SUCCESSES,),
    CURRICULUM.name: (
        _Law(
            "position",
            "one of 0, 1, 2 ... without a gap or a repetition in its phase",
            lambda frame: frame.groupby("phase")["position"].rank("first") == frame["position"] + 1,
        ),
    ),
    ROLLOUTS.name: (
        _Law("group", "of one prompt, and that prompt's only one", _one_to_one),
        _Law(
            "rollout_id",
            "its prompt_id with /0, /1, /2 ... in this order",
            lambda frame: frame["rollout_id"] == member_ids(frame),
        ),
        _Law(FIRST_SCORE, "that of its group, with first_answer", _has_first_answer_of_group),
    ),
    REWARDS.name: (
        _Law(
            "outcome",
            "0, or 1 with the status scored",
            lambda frame: (
                (frame["outcome"] == 0) | ((frame["outcome"] == 1) & (frame["status"] == "scored"))
            ),
        ),
    ),
    PROMPTS.name: (
        _Law("entry", "a JSON object", lambda frame: frame["entry"].map(_is_object).astype(bool)),
    ),
}


def require_part(prompts: pd.DataFrame, part: str, path: Path) -> None:
    """Raises ArtifactError unless all prompt ids start with `part`: train, eval or warmup."""
    others = np.flatnonzero(~prompts["prompt_id"].str.startswith(f"{part}-"))
    if len(others):
        error = wrong_cell(prompts, path, int(others[0]), "prompt_id", f"{part}-...")
        raise ArtifactError(f"{error}; rerun the stage prepare")


def is_count(value: object) -> bool:
    """Returns whether a stored value is an integer in [0, LARGEST_COUNT]."""
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def is_judged(rewards: pd.DataFrame) -> "pd.Series[bool]":
    """Returns which rollouts were judged; training statistics exclude the others.

    `unparsable` and `timed_out` are caused by the policy: these rollouts count as judged, with
    outcome 0. If the environment, the sampler or the judge `failed`, or the judge's server left a
    rollout `unanswered`, the outcome is unknown.

    Args:
      rewards: Schema REWARDS.
    """
    return ~rewards["status"].isin(("failed", "unanswered"))


def read_table(path: Path, schema: pa.DataFrameSchema) -> pd.DataFrame:
    """Returns a validated table.

    Raises:
      ArtifactError: If the file is missing, not parquet, or violates the schema.
    """
    with _explained(path):
        content = path.read_bytes()
        frame = pd.read_parquet(io.BytesIO(content), engine="pyarrow").reset_index(drop=True)
    known = _known(content, schema)
    if known not in _VALID:
        try:
            frame = validate(frame, schema, path)
        except ArtifactError as error:
            raise ArtifactError(f"{error}; rerun the stage that writes it") from None
        _VALID.add(known)
    return frame


def _known(content: bytes, schema: pa.DataFrameSchema) -> tuple[str, bytes]:
    """Returns what `_VALID` has of a file that satisfies a schema."""
    return str(schema.name), hashlib.sha256(content).digest()


def read_tables(paths: Sequence[Path], schema: pa.DataFrameSchema) -> list[pd.DataFrame]:
    """Returns the validated tables of a schema in several files; keys may repeat between files.

    The files are validated together, which is much faster for many small ones; if that fails, one
    by one, so that the error names the file and the row.

    Raises:
      ArtifactError: If a file is missing, not parquet, or violates the schema.
    """
    if len(paths) == 1:
        return [read_table(paths[0], schema)]
    frames = []
    for path in paths:
        with _explained(path):
            frames.append(pd.read_parquet(path, engine="pyarrow"))
    if not _are_valid_together(frames, schema):
        frames = [read_table(path, schema) for path in paths]
    return frames


def _are_valid_together(frames: Sequence[pd.DataFrame], schema: pa.DataFrameSchema) -> bool:
    """Returns whether tables are valid, if validating them as one table shows it."""
    first = frames[0]
    if any(len(each) == 0 or not each.dtypes.equals(first.dtypes) for each in frames):
        return False
    try:
        marked = [_with_own_keys(each, number) for number, each in enumerate(frames)]
        validate(pd.concat(marked, ignore_index=True), schema, Path("tables"))
    except (ArtifactError, AttributeError, KeyError, TypeError):
        return False
    return True


def _with_own_keys(frame: pd.DataFrame, number: int) -> pd.DataFrame:
    """Returns a table whose ids and groups no other table has; invalid ones stay as they are."""
    names = [name for name in ("rollout_id", "prompt_id") if name in frame]
    own = {name: frame[name].where(frame[name] == "", f"{number}:" + frame[name]) for name in names}
    if "group" in frame:
        group = frame["group"]
        own["group"] = group.where(group < 0, group + number * LARGEST_GROUPS)
    return frame.assign(**own)


def read_profile(path: Path) -> pd.DataFrame:
    """Returns a table of schema PROFILE; it has no rows if no stage uses a profile.

    Raises:
      ArtifactError: If the file is missing, not parquet, or violates the schema.
    """
    return read_table(path, PROFILE) if count_rows(path) else empty_table(PROFILE)


def known_prompts(profile: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of a profile with a judged rollout."""
    return profile[profile["rollouts"] > 0].reset_index(drop=True)


def iteration_name(index: int) -> str:
    """Returns the name of the directory of an iteration."""
    return f"iteration-{index:04d}"


def empty_table(schema: pa.DataFrameSchema) -> pd.DataFrame:
    """Returns a table without rows that has a schema's columns and types."""
    columns = [(name, each) for name, each in schema.columns.items() if each.required]
    return pd.DataFrame({name: pd.Series(dtype=str(each.dtype)) for name, each in columns})


def count_rows(path: Path) -> int:
    """Returns a table's number of rows, from its metadata alone.

    Raises:
      ArtifactError: If the file is missing or not parquet.
    """
    with _explained(path):
        return int(parquet.read_metadata(path).num_rows)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raises ArtifactError if the parquet file that the block reads is missing or broken."""
    require_plain(path)
    if path.is_dir():  # pandas would read it as a dataset of several files
        raise ArtifactError(f"{path}: must be a parquet file, is a directory; correct the path")
    try:
        yield
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; run the stage that writes it") from None
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ArtifactError(
            f"{path}: must be whole parquet, {reason}; delete it and rerun"
        ) from None


def write_table(
    frame: pd.DataFrame, path: Path, schema: pa.DataFrameSchema, *, allow_empty: bool = False
) -> None:
    """Validates a table and writes it atomically as parquet.

    Raises:
      ArtifactError: If the table violates the schema.
    """
    columns = _columns(frame, schema)
    missing = [name for name in columns if name not in frame.columns]
    ordered = frame if missing else frame[columns].reset_index(drop=True)
    if len(ordered) or not allow_empty:
        ordered = validate(ordered, schema, path)
    table = arrow.Table.from_pandas(ordered, preserve_index=False)
    with atomic_path(path) as temporary:
        parquet.write_table(table, temporary, compression="zstd")
        if len(ordered):
            _VALID.add(_known(temporary.read_bytes(), schema))


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Writes a table as CSV atomically, with all digits of floats."""
    write_bytes(path, frame.to_csv(index=False, lineterminator="\n").encode())


def validate(frame: pd.DataFrame, schema: pa.DataFrameSchema, path: Path) -> pd.DataFrame:
    """Returns `frame` if it satisfies the schema.

    Raises:
      ArtifactError: Otherwise; the message names file, row, column, rule and value.
    """
    if len(frame) == 0:
        raise ArtifactError(f"{path}: must have at least one row, got an empty table")
    try:
        valid = schema.validate(frame.reset_index(drop=True), lazy=True)
    except pa.errors.SchemaErrors as error:
        raise ArtifactError(_explain(frame, schema, path, error.failure_cases)) from None
    for column, rule, holds in LAWS.get(schema.name, ()):
        broken = np.flatnonzero(~holds(valid))
        if len(broken):
            raise wrong_cell(valid, path, int(broken[0]), column, rule)
    return valid


def wrong_cell(frame: pd.DataFrame, path: Path, row: int, column: str, rule: str) -> ArtifactError:
    """Returns the error for a cell that violates a rule.

    Args:
      rule: The text after "must be".
    """
    key = frame.columns[0]
    return ArtifactError(
        f"{path}: row {row} ({key}={frame[key].iloc[row]!r}): column {column!r} must be {rule}, "
        f"got {brief(frame[column].iloc[row])}"
    )


def _explain(
    frame: pd.DataFrame, schema: pa.DataFrameSchema, path: Path, cases: pd.DataFrame
) -> str:
    """Returns one line about the first failure; failures of the whole table come first."""
    case = cases.sort_values("index", na_position="first", kind="stable").iloc[0]
    check, value = str(case["check"]), case["failure_case"]
    if check == "column_in_dataframe":
        return f"{path}: column {value!r} is missing; it needs {_columns(frame, schema)}"
    if check == "column_in_schema":
        return f"{path}: column {value!r} is unknown; it needs {_columns(frame, schema)}"
    if check == "column_ordered":
        return f"{path}: columns must be {_columns(frame, schema)}, got {list(frame.columns)}"
    rule = check.removeprefix("be ") if check.startswith("be ") else check
    wording = {"field_uniqueness": "unique", "not_nullable": "present"}.get(rule, rule)
    verb = "must" if wording.startswith("not ") else "must be"
    if pd.isna(case["index"]):
        return f"{path}: column {case['column']!r} {verb} {wording}, got {value}"
    key = next(iter(schema.columns))
    row = int(case["index"])
    return (
        f"{path}: row {row} ({key}={frame.reset_index()[key].iloc[row]!r}): "
        f"column {case['column']!r} {verb} {wording}, got {value}"
    )


def unscored(rewards: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Returns the counts by status for the summary if no rollout was scored, else nothing.

    Args:
      rewards: Schema REWARDS.
    """
    statuses = rewards["status"].value_counts()
    if SCORED in statuses:
        return {}
    return {UNSCORED: {str(status): int(number) for status, number in statuses.items()}}
