"""User-provided prompts: JSON lines, a JSON array or a parquet table."""

import json
import math
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NoReturn

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
from pydantic import Field, field_validator

from grpo.errors import AbsentError, ArtifactError, ParameterError, brief
from grpo.runtime.chats import ROLES, extend_prompt, has_messages, is_chat, write_chat
from grpo.runtime.sources import download
from grpo.schema import PARAMS, DataPath, S3Base
from grpo.tasks.base import PromptTables, Task, TaskInputs

LOOSE = "\0"  # prefix of normalized prompts; no prompt may contain it
FIELDS = ("prompt", "answer", "family")
COMMON_NAMES = {  # common names of these columns
    "prompt": ("question", "problem", "query", "input", "instruction", "text", "caption"),
    "answer": ("solution", "target", "output", "response", "label", "ground_truth", "final_answer"),
}
_NO_JSON = object()


class JsonlTask(Task):
    """Prompts and answers from two files: JSON lines, a JSON array or a parquet table."""

    prompt_kinds = ("text", "caption")

    kind: Literal["jsonl"]
    directory: S3Base | None  # location of the files; null: data/
    train: DataPath
    eval: DataPath
    columns: dict[  # field -> its column in the files, if the names differ
        Literal["prompt", "answer", "family"], Annotated[str, Field(min_length=1)]
    ]
    instruction: str  # appended to every prompt; to the last message of a chat

    @field_validator("columns")
    @classmethod
    def _divides_prompt_and_answer(cls, columns: dict[str, str]) -> dict[str, str]:
        if columns.get("prompt", "prompt") == columns.get("answer", "answer"):
            raise ValueError("must name different columns for prompt and answer")
        return columns

    def files(self) -> Iterator[tuple[str, str]]:
        if self.directory is None:
            yield "task.train", self.train
            yield "task.eval", self.eval

    def make_prompts(self, inputs: TaskInputs) -> PromptTables:
        """Returns the prompts of two files; the family defaults to the name of their folder."""
        if inputs.warmup:
            raise ParameterError(
                f"{PARAMS}: policy.base.source scratch needs a task with solutions, on which the "
                "base is warmed up, and task.kind jsonl has none; set another source"
            )
        folder, name = inputs.data, inputs.data.name
        if self.directory is not None:
            folder = download(self.directory, parameter="task.directory")
            name = self.directory.uri.rstrip("/").rpartition("/")[2]
        return read_prompts(
            train=folder / self.train,
            evaluation=folder / self.eval,
            instruction=self.instruction,
            family=PurePosixPath(self.train).parent.name or name,
            columns={str(field): name for field, name in self.columns.items()},
            takes_messages=inputs.takes_messages,
        )


class _Number(str):
    """A number with its spelling in the file: 1.50 stays 1.50."""


def read_prompts(
    *,
    train: Path,
    evaluation: Path,
    instruction: str,
    family: str,
    columns: Mapping[str, str],
    takes_messages: bool,
) -> PromptTables:
    """Returns the prompts of two files, each followed by `instruction`, and an empty warm-up.

    Args:
      family: Family of rows without one.
      columns: The names of the columns "prompt", "answer" and "family" where they differ.
      takes_messages: Whether a prompt may be a chat: a list of messages.

    Raises:
      ArtifactError: If a row is invalid or a prompt is a duplicate. Within a file, prompts are
        compared up to Unicode composition and surrounding white space; between the files, also up
        to case, all white space, invisible characters and compatible forms.
    """
    seen: dict[str, str] = {}  # prompt -> its location
    frames: list[pd.DataFrame] = []
    names = {columns.get(field, field) for field in FIELDS}
    for part, path in (("train", train), ("eval", evaluation)):
        rows = []
        for number, where, item in _read(path, names):
            row = _read_row(item, f"{path}: {where}", columns, takes_messages)
            _require_new(row["prompt"], f"{path}: {where}", seen, is_first=not frames)
            rows.append(
                {
                    "prompt_id": f"{part}-{number:06d}",
                    "family": row.get("family", family),
                    "prompt": extend_prompt(row["prompt"], instruction),
                    "answer": row["answer"],
                    "entry": _entry(item, columns, f"{path}: {where}"),
                }
            )
        if not rows:
            raise ArtifactError(f"{path}: must have at least one prompt, got none")
        frames.append(pd.DataFrame(rows))
    empty = pd.DataFrame(columns=["prompt_id", "family", "prompt", "solution"])
    return PromptTables(frames[0], frames[1], empty)


def _entry(item: Mapping[str, Any], columns: Mapping[str, str], where: str) -> str:
    """Returns the other columns of a row as JSON, for judges; leaves out what JSON has not."""
    used = {"prompt", columns.get("prompt", "prompt"), "answer", "family"}
    kept = {}
    for name, each in item.items():
        if name in used:
            continue
        try:
            kept[name] = _plain(each)
        except ValueError:
            raise ArtifactError(
                f"{where}: {name} must have numbers of at most {sys.get_int_max_str_digits()} "
                "digits; write longer ones as texts"
            ) from None
    return json.dumps({name: each for name, each in kept.items() if each is not _NO_JSON})


def _plain(value: Any) -> Any:
    """Returns a value of a row for JSON: numbers as numbers, NaN as null; else _NO_JSON.

    A decimal number beyond the largest float is null, too.

    Raises:
      ValueError: If an integer has more digits than Python reads.
    """
    match value:
        case _Number():
            return _plain(json.loads(value))
        case float() if not math.isfinite(value):
            return None
        case {"": str()} if len(value) == 1:  # NaN, Infinity
            return None
        case dict():
            inside = {str(name): _plain(each) for name, each in value.items()}
            return {name: each for name, each in inside.items() if each is not _NO_JSON}
        case list():
            return [each for each in map(_plain, value) if each is not _NO_JSON]
        case None | str() | bool() | int() | float():
            return value
    return _NO_JSON


def _require_new(prompt: str, where: str, seen: dict[str, str], *, is_first: bool) -> None:
    """Raises ArtifactError if a prompt is a duplicate; between files, compares loose forms too."""
    exact = unicodedata.normalize("NFC", prompt).strip()
    loose = _loosen(prompt)
    before = seen.get(exact) or (None if is_first else seen.get(LOOSE + loose))
    if before:
        raise ArtifactError(
            f"{where}: the prompt {brief(repr(prompt))} duplicates {before} (between files, case, "
            "white space, invisible characters and widths are ignored); remove one"
        )
    seen[exact] = where
    if is_first:
        seen.setdefault(LOOSE + loose, where)


def _loosen(prompt: str) -> str:
    """Normalizes case, white space, invisible characters and compatible forms of a prompt."""
    plain = unicodedata.normalize("NFKC", prompt)
    seen = "".join(each for each in plain if unicodedata.category(each) != "Cf")
    return " ".join(seen.casefold().split())


def _read_row(
    item: Any, where: str, columns: Mapping[str, str], takes_messages: bool
) -> dict[str, str]:
    """Returns the texts of a row by field."""
    if not isinstance(item, dict):
        raise ArtifactError(f'{where} must be {{"prompt": ..., "answer": ...}}, got {_show(item)}')
    row = {}
    for field in FIELDS:
        name = columns.get(field, field)
        if name not in item:
            if field == "family" and field not in columns:
                continue
            raise ArtifactError(f"{where} must have {name!r}, {_suggest(field, item)}")
        value = item[name]
        if field == "prompt" and isinstance(value, list):
            value = _read_messages(value, f"{where}: {name}", takes_messages)
        elif field == "prompt" and isinstance(value, str) and has_messages(value):
            raise ArtifactError(
                f"{where}: {name} is a text with a list of messages; write it as a list"
            )
        if not isinstance(value, str):
            raise ArtifactError(
                f"{where}: {name} must be a text or a number, got {_show(value)}; "
                "write it as a text, or remove the row"
            )
        if field != "answer" and not value.strip():
            raise ArtifactError(f"{where}: {name} must not be empty, got {value!r}")
        _require_characters(value, f"{where}: {name}")
        row[field] = str(value)
    return row


def _suggest(field: str, item: Mapping[str, Any]) -> str:
    """Returns the columns of a row and a suggestion for task.columns, for an error message."""
    near = [each for each in COMMON_NAMES.get(field, ()) if each in item]
    way = f"; set task.columns to {{{field}: {near[0]}}}" if near else ""
    return f"got {brief(sorted(map(str, item)))}{way}"


def _read_messages(messages: list[Any], where: str, takes_messages: bool) -> str:
    """Returns the prompt of a chat; policies apply their chat template."""
    if not takes_messages:
        raise ArtifactError(
            f"{where} is a list of messages, which needs policy.prompt_format chat; set it, or "
            "write the prompt as a text"
        )
    if not is_chat(messages):
        raise ArtifactError(
            f'{where} must be a list of {{"role": {" | ".join(ROLES)}, "content": TEXT}}, the last '
            f"of the user, got {_show(messages)}"
        )
    blank = [each for each in messages if not each["content"].strip()]
    if blank:
        raise ArtifactError(
            f"{where} must have no empty message, got one of the {blank[0]['role']}; remove it"
        )
    return write_chat(messages)


def _require_characters(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArtifactError(
            f"{where} must be Unicode, got a lone surrogate at {error.start}; correct the escape"
        ) from None
    if "\0" in text:
        raise ArtifactError(f"{where} must not contain the character 0; remove it")


def _read(path: Path, names: Set[str]) -> Iterator[tuple[int, str, Any]]:
    """Yields number, location and content of each row of a file.

    Args:
      names: The columns to read.
    """
    if path.exists() and not path.is_file():
        raise ArtifactError(f"{path}: must be a file of prompts, is none")
    if path.suffix == ".parquet":
        yield from _read_parquet(path, names)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise AbsentError(f"{path}: must be a JSON-lines file, {error}") from None
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path}: must be a JSON-lines file in UTF-8, {error}") from None
    if text.lstrip().startswith("["):
        for number, item in enumerate(_parse(text, f"{path}: the array"), start=1):
            yield number, f"item {number}", item
        return
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines has more separators
        if line.strip():
            yield number, f"line {number}", _parse(line, f"{path}: line {number}")


def _parse(text: str, where: str) -> Any:
    """Parses JSON; numbers become texts in their original spelling."""
    try:
        return json.loads(
            text,
            parse_int=_Number,
            parse_float=_Number,
            parse_constant=lambda name: {"": name},
            object_pairs_hook=lambda pairs: _object(pairs, where),
        )
    except RecursionError:
        raise ArtifactError(f"{where} must be JSON, got too many nested levels") from None
    except json.JSONDecodeError as error:
        raise ArtifactError(
            f"{where} must be JSON, {error}, got {brief(repr(text[:60]))}"
        ) from None


def _object(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArtifactError(f"{where} must have each name once, got {twice!r} twice")
    return found


def _read_parquet(path: Path, names: Set[str]) -> Iterator[tuple[int, str, Any]]:
    try:
        table = parquet.read_table(path)
    except FileNotFoundError as error:
        raise AbsentError(f"{path}: must be a parquet file, {error}") from None
    except (pa.ArrowException, OSError) as error:
        raise ArtifactError(f"{path}: must be a parquet file, {brief(error)}") from None
    try:
        rows = table.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError) as error:  # such as a date beyond 9999
        raise ArtifactError(f"{path}: holds a value that Python lacks, {brief(error)}") from None
    for name, column in zip(table.column_names, table.columns):
        if name in names and pa.types.is_floating(column.type):
            _refuse_floats(path, name, column.to_pylist())
    for number, row in enumerate(rows, start=1):
        texts = {
            name: _Number(value) if type(value) is int else value for name, value in row.items()
        }
        yield number, f"row {number}", texts


def _refuse_floats(path: Path, name: str, values: list[float | None]) -> NoReturn:
    """Raises for a column of floats; an integer column with missing values also has floats."""
    gaps = [row for row, value in enumerate(values, 1) if value is None or math.isnan(value)]
    where = f"row {gaps[0]}: {name} is missing, the others" if gaps else f"column {name!r}: they"
    raise ArtifactError(
        f"{path}: {where} are floats; store numbers as text, because floats lose their spelling"
    )


def _show(value: Any) -> str:
    """Returns a value as brief JSON."""
    if isinstance(value, dict) and list(value) == [""]:  # NaN, Infinity
        return str(value[""])
    return brief(json.dumps(value, default=str))
