"""Corruptions of a workspace; each function returns a function of the workspace."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors.numpy import load_file, save_file

from grpo.params.yaml import dump_yaml, parse_yaml

Corruption = Callable[[Path], None]
Arrays = dict[str, np.ndarray]


def set_param(path: str, value: object) -> Corruption:
    """Sets a parameter by its dotted path; lists by number."""

    def corrupt(workspace: Path) -> None:
        file = workspace / "params.yaml"
        content = parse_yaml(file.read_text())
        *parents, last = path.split(".")
        node = content
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node[key]
        if isinstance(node, list):
            node[int(last)] = value
        else:
            node[last] = value
        file.write_text(dump_yaml(content))

    return corrupt


def drop_param(path: str) -> Corruption:
    def corrupt(workspace: Path) -> None:
        file = workspace / "params.yaml"
        content = parse_yaml(file.read_text())
        *parents, last = path.split(".")
        node = content
        for key in parents:
            node = node[key]
        del node[last]
        file.write_text(dump_yaml(content))

    return corrupt


def copy_param(source: str, target: str) -> Corruption:
    """Sets a parameter of a mapping to the value of another one."""

    def corrupt(workspace: Path) -> None:
        content = parse_yaml((workspace / "params.yaml").read_text())
        for key in source.split("."):
            content = content[key]
        set_param(target, content)(workspace)

    return corrupt


def rename_param(path: str, name: str) -> Corruption:
    """Renames a parameter of a mapping."""
    renamed = ".".join([*path.split(".")[:-1], name])
    return both(copy_param(path, renamed), drop_param(path))


def add_named(section: str, name: str) -> Corruption:
    """Gives the first entry of a section of params.yaml a second name."""

    def corrupt(workspace: Path) -> None:
        file = workspace / "params.yaml"
        content = parse_yaml(file.read_text())
        content[section][name] = next(iter(content[section].values()))
        file.write_text(dump_yaml(content))

    return corrupt


def write(path: str, content: str | bytes) -> Corruption:
    def corrupt(workspace: Path) -> None:
        file = workspace / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    return corrupt


def remove(path: str) -> Corruption:
    return lambda workspace: (workspace / path).unlink()


def truncate(path: str) -> Corruption:
    """Keeps the first 60 % of a file's bytes."""

    def corrupt(workspace: Path) -> None:
        file = workspace / path
        content = file.read_bytes()
        file.write_bytes(content[: len(content) * 6 // 10])

    return corrupt


def take(path: str, source: str) -> Corruption:
    """Replaces `path` by another file of the workspace."""
    return lambda workspace: write(path, (workspace / source).read_bytes())(workspace)


def edit_table(path: str, change: Callable[[pd.DataFrame], pd.DataFrame]) -> Corruption:
    def corrupt(workspace: Path) -> None:
        change(pd.read_parquet(workspace / path)).to_parquet(workspace / path)

    return corrupt


def set_cell(path: str, row: int, column: str, value: object) -> Corruption:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        column_of_any_type = frame[column].astype(object)
        column_of_any_type[row] = value
        return frame.assign(**{column: column_of_any_type.infer_objects()})

    return edit_table(path, change)


def edit_tensors(path: str, change: Callable[[Arrays], Arrays]) -> Corruption:
    def corrupt(workspace: Path) -> None:
        file = workspace / path
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return corrupt


def without(name: str) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def both(first: Corruption, second: Corruption) -> Corruption:
    def corrupt(workspace: Path) -> None:
        first(workspace)
        second(workspace)

    return corrupt


def leave(workspace: Path) -> None:
    """Changes nothing, for cases whose error is elsewhere."""
