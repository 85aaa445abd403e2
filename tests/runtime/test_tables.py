"""Tables: the same bytes for the same rows, and a sentence for every broken rule."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from grpo.errors import ArtifactError
from grpo.runtime.artifacts import tables
from grpo.runtime.artifacts.media import encode_png, read_rows
from grpo.runtime.artifacts.tables import EVALUATION_SAMPLES, REWARDS, read_table, write_table
from grpo.runtime.artifacts.tensors import (
    read_tensors,
    unpack_ragged,
    write_tensors,
)


def rewards(**changes: object) -> pd.DataFrame:
    columns: dict[str, object] = {
        "rollout_id": ["p/0", "p/1"],
        "prompt_id": ["p", "p"],
        "outcome": [1.0, 0.0],
        "reward": [1.0, -0.5],
        "status": ["scored", "unparsable"],
        "detail": "",
    }
    return pd.DataFrame({**columns, **changes})


PARTS_THAT_ARE_NONE = (
    *("", "[[2, 1.0]", "{}", "null", "7", "[2, 1.0]", "[[2]]", "[[2, 1.0, 1.0]]", "[[2, 1.5]]"),
    *("[[2, NaN]]", '[[2, "1"]]', "[[2.5, 1.0]]", "[[0, 1.0]]", "[[3, 1.0], [3, 1.0]]"),
    *("[[true, 1.0]]", "[[2, null]]", "[" * 200000),
)


def test_a_table_comes_back_as_it_was_written_and_in_the_same_bytes(tmp_path: Path):
    for name in ("a", "b"):
        write_table(rewards(), tmp_path / f"{name}.parquet", REWARDS)
    pd.testing.assert_frame_equal(read_table(tmp_path / "a.parquet", REWARDS), rewards())
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reward": [1.0, np.nan]},
            "r.parquet: row 1 (rollout_id='p/1'): column 'reward' must be present, got nan",
        ),
        (
            {"reward": [np.inf, 0.0]},
            "r.parquet: row 0 (rollout_id='p/0'): column 'reward' must be finite, got inf",
        ),
        (
            {"outcome": [0.0, 1.5]},
            "r.parquet: row 1 (rollout_id='p/1'): column 'outcome' must be in [0, 1], got 1.5",
        ),
        ({"status": ["scored", "lost"]}, "column 'status' must be one of"),
        ({"rollout_id": ["p/0", "p/0"]}, "column 'rollout_id' must be unique, got p/0"),
        ({"outcome": ["1", "0"]}, "r.parquet: column 'outcome' must be"),
        ({"luck": [1, 2]}, "r.parquet: column 'luck' is unknown"),
        *(
            (
                {"parts": ["[[2, 1.0], [5, 0]]", cell]},
                "row 1 (rollout_id='p/1'): column 'parts' must",
            )
            for cell in PARTS_THAT_ARE_NONE
        ),
    ],
)
def test_a_broken_rule_names_file_row_column_and_value(
    tmp_path: Path, changes: dict[str, object], message: str
):
    path = tmp_path / "r.parquet"
    rewards(**changes).to_parquet(path)
    with pytest.raises(ArtifactError, match=re.escape(message)) as raised:
        read_table(path, REWARDS)
    assert "\n" not in str(raised.value)


def test_a_missing_column_an_empty_table_and_a_missing_file_are_named(tmp_path: Path):
    path = tmp_path / "r.parquet"
    rewards().drop(columns="reward").to_parquet(path)
    with pytest.raises(ArtifactError, match="column 'reward' is missing"):
        read_table(path, REWARDS)
    rewards().head(0).to_parquet(path)
    with pytest.raises(ArtifactError, match="at least one row"):
        read_table(path, REWARDS)
    with pytest.raises(ArtifactError, match="no such file"):
        read_table(tmp_path / "none.parquet", REWARDS)


def test_samples_hold_images_as_png_or_none(tmp_path: Path):
    path = tmp_path / "s.parquet"
    png = encode_png(np.zeros((1, 2, 3), dtype=np.uint8))
    texts = dict.fromkeys(("prompt_id", "family", "prompt", "text"), "a")
    samples = pd.DataFrame({"rollout_id": ["p/0", "p/1"], **texts, "image": [png, b""]})
    samples = samples.assign(outcome=1.0, reward=1.0)
    write_table(samples, path, EVALUATION_SAMPLES)
    assert read_table(path, EVALUATION_SAMPLES)["image"].tolist() == [png, b""]
    samples.assign(image=[png, b"GIF89a"]).to_parquet(path)
    message = r"row 1 \(rollout_id='p/1'\): column 'image' must be PNG or no bytes, got b'GIF89a'"
    with pytest.raises(ArtifactError, match=message):
        read_table(path, EVALUATION_SAMPLES)


def test_writing_a_broken_table_leaves_the_old_one(tmp_path: Path):
    path = tmp_path / "r.parquet"
    write_table(rewards(), path, REWARDS)
    with pytest.raises(ArtifactError):
        write_table(rewards(reward=[np.nan, 0.0]), path, REWARDS)
    assert len(read_table(path, REWARDS)) == 2


def test_a_valid_table_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, copied = tmp_path / "r.parquet", tmp_path / "c.parquet"
    rewards(outcome=[1.0, 2.0]).to_parquet(path)
    content = path.read_bytes()
    rewards(outcome=[1.0, 0.0]).to_parquet(path)
    read_table(path, REWARDS)
    shutil.copyfile(path, copied)
    with monkeypatch.context() as patch:
        patch.setattr(tables, "validate", lambda *_: pytest.fail("validated twice"))
        assert read_table(copied, REWARDS)["outcome"].tolist() == [1.0, 0.0]
    before = path.stat()
    path.write_bytes(content)  # in place, as fast as a clock may not see
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert [before[each] for each in range(9)] == [after[each] for each in range(9)]
    with pytest.raises(ArtifactError, match="column 'outcome' must be in"):
        read_table(path, REWARDS)


@pytest.mark.parametrize("keep", [0, 20, 0.5, -1])
def test_truncated_parquet_and_safetensors_are_named(tmp_path: Path, keep: float):
    table, tensors = tmp_path / "r.parquet", tmp_path / "t.safetensors"
    write_table(rewards(), table, REWARDS)
    write_tensors(tensors, {"x": torch.arange(100)})
    for path in (table, tensors):
        content = path.read_bytes()
        size = int(len(content) * keep) if isinstance(keep, float) else keep
        path.write_bytes(content[:size])
    with pytest.raises(ArtifactError, match=r"r\.parquet: must be whole parquet"):
        read_table(table, REWARDS)
    with pytest.raises(ArtifactError, match=r"t\.safetensors: must be whole safetensors"):
        read_tensors(tensors)
    with pytest.raises(ArtifactError, match=r"t\.safetensors: must be whole safetensors"):
        read_rows(tensors, "x", [0])


def test_some_rows_of_a_tensor_are_those_of_the_whole(tmp_path: Path):
    path, rows = tmp_path / "t", torch.arange(12).reshape(4, 3)
    write_tensors(path, {"x": rows})
    np.testing.assert_array_equal(read_rows(path, "x", [3, 0]), rows[[3, 0]].numpy())
    with pytest.raises(ArtifactError, match="t: 'x' must have at least 5 rows, got 4"):
        read_rows(path, "x", [4, 0])
    with pytest.raises(ArtifactError, match="t: 'y' must have at least 1 rows, got 0"):
        read_rows(path, "y", [0])
    with pytest.raises(ArtifactError, match="none: no such file"):
        read_rows(tmp_path / "none", "x", [0])


def test_tensors_come_back_and_in_the_same_bytes_whatever_their_order(tmp_path: Path):
    x, y = torch.rand(3), torch.arange(4)
    write_tensors(tmp_path / "a", {"x": x, "y": y})
    write_tensors(tmp_path / "b", {"y": y, "x": x})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert torch.equal(read_tensors(tmp_path / "a")["x"], x)


def test_ragged_rows_are_padded_with_0():
    rows = unpack_ragged(torch.tensor([1, 2, 3]), torch.tensor([1, 2]))
    assert rows.tolist() == [[1, 0], [2, 3]]
    with pytest.raises(ArtifactError, match="3 entries, its lengths ask for 4"):
        unpack_ragged(torch.tensor([1, 2, 3]), torch.tensor([2, 2]))
