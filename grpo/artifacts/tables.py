"""Every table of the pipeline: its schema, and validated reading and writing of parquet."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pandera.pandas as pa
import pyarrow as arrow
import pyarrow.parquet as parquet

from grpo.artifacts.files import atomic_path, write_bytes
from grpo.artifacts.images import is_png
from grpo.errors import ArtifactError

STATUSES = ("scored", "unparsable", "timed_out", "failed")

_finite = pa.Check(lambda column: np.isfinite(column), name="finite", error="be finite")
_filled = pa.Check(lambda column: column.str.len() > 0, error="not be empty")


def _at_least(low: int) -> pa.Check:
    return pa.Check.ge(low, error=f"be >= {low}")


_fraction = pa.Check.in_range(0, 1, error="be in [0, 1]")
_image = pa.Check(
    lambda each: each == b"" or is_png(each), element_wise=True, error="be PNG or no bytes"
)


def _schema(name: str, key: str, columns: dict[str, pa.Column]) -> pa.DataFrameSchema:
    """Returns a strict schema whose first column identifies the row in messages."""
    identity = {key: pa.Column(str, _filled, unique=True)}
    return pa.DataFrameSchema({**identity, **columns}, strict=True, ordered=True, name=name)


PROMPTS = _schema(
    "prompts",
    "prompt_id",
    {
        "family": pa.Column(str, _filled),
        "prompt": pa.Column(str, _filled),
        "answer": pa.Column(str),
        "entry": pa.Column(str),  # JSON: what the judge needs besides the text
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
        "rollouts": pa.Column("int64", _at_least(1)),
        "successes": pa.Column("int64", _at_least(0)),
        "outcome_rate": pa.Column("float64", _fraction),
        "mean_steps": pa.Column("float64", [_finite, _at_least(0)]),
    },
)
CURRICULUM = _schema(
    "curriculum",
    "prompt_id",
    {
        "family": pa.Column(str, _filled),
        "phase": pa.Column("int64", _at_least(1)),
        "position": pa.Column("int64", _at_least(0)),  # order within the phase
        "rollouts": pa.Column("int64", _at_least(2)),  # the group's size
        "outcome_rate": pa.Column("float64", _fraction),
    },
)
ROLLOUTS = _schema(
    "rollouts",
    "rollout_id",
    {
        "prompt_id": pa.Column(str, _filled),
        "group": pa.Column("int64", _at_least(0)),
        "text": pa.Column(str),
        "steps": pa.Column("int64", _at_least(0)),  # with a log-probability
        "is_finished": pa.Column(bool),  # ended by itself, not by the step limit
    },
)
REWARDS = _schema(
    "rewards",
    "rollout_id",
    {
        "prompt_id": pa.Column(str, _filled),
        "outcome": pa.Column("float64", [_finite, _fraction]),
        "reward": pa.Column("float64", _finite),
        "status": pa.Column(str, pa.Check.isin(STATUSES, error=f"be one of {STATUSES}")),
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
        "greedy": pa.Column("float64", _fraction, nullable=True),  # none: no greedy decoding
        "rollouts": pa.Column("int64", _at_least(1)),
        "successes": pa.Column("int64", _at_least(0)),
    },
)
EVALUATION_SAMPLES = _schema(
    "evaluation samples",
    "rollout_id",
    {
        "prompt_id": pa.Column(str, _filled),
        "family": pa.Column(str, _filled),
        "prompt": pa.Column(str, _filled),
        "text": pa.Column(str),  # what the judge judged: written, or read off the image
        "image": pa.Column(object, _image),  # PNG; no bytes if rollouts are text
        "outcome": pa.Column("float64", [_finite, _fraction]),
        "reward": pa.Column("float64", [_finite, _fraction]),  # the judge's score, not shaped
    },
)


def read_table(path: Path, schema: pa.DataFrameSchema) -> pd.DataFrame:
    """Returns a validated table.

    Raises:
      ArtifactError: If the file is missing, no parquet, or breaks the schema.
    """
    with _explained(path):
        frame = pd.read_parquet(path, engine="pyarrow")
    return validate(frame, schema, path)


def count_rows(path: Path) -> int:
    """Returns how many rows a table says that it has; nothing else of it is read.

    Raises:
      ArtifactError: If the file is missing or no parquet.
    """
    with _explained(path):
        return int(parquet.read_metadata(path).num_rows)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raises an ArtifactError where a parquet file is missing or broken."""
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
      ArtifactError: If the table breaks the schema.
    """
    columns = list(schema.columns)
    missing = [name for name in columns if name not in frame.columns]
    ordered = frame if missing else frame[columns].reset_index(drop=True)
    if len(ordered) or not allow_empty:
        ordered = validate(ordered, schema, path)
    table = arrow.Table.from_pandas(ordered, preserve_index=False)
    with atomic_path(path) as temporary:
        parquet.write_table(table, temporary, compression="zstd")


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Writes a table as CSV atomically; floats keep all their digits."""
    write_bytes(path, frame.to_csv(index=False, lineterminator="\n").encode())


def validate(frame: pd.DataFrame, schema: pa.DataFrameSchema, path: Path) -> pd.DataFrame:
    """Returns `frame` if it keeps the schema.

    Raises:
      ArtifactError: Naming file, row, column, rule and value.
    """
    if len(frame) == 0:
        raise ArtifactError(f"{path}: must have at least one row, got an empty table")
    try:
        return schema.validate(frame.reset_index(drop=True), lazy=True)
    except pa.errors.SchemaErrors as error:
        raise ArtifactError(_explain(frame, schema, path, error.failure_cases)) from None


def _explain(
    frame: pd.DataFrame, schema: pa.DataFrameSchema, path: Path, cases: pd.DataFrame
) -> str:
    """Returns one line about the first failure: the whole table's before a row's."""
    case = cases.sort_values("index", na_position="first", kind="stable").iloc[0]
    check, value = str(case["check"]), case["failure_case"]
    if check == "column_in_dataframe":
        return f"{path}: column {value!r} is missing; it needs {list(schema.columns)}"
    if check == "column_in_schema":
        return f"{path}: column {value!r} is unknown; it needs {list(schema.columns)}"
    if check == "column_ordered":
        return f"{path}: columns must be {list(schema.columns)}, got {list(frame.columns)}"
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
