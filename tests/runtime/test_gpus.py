"""GPUs as CUDA counts them."""

from pathlib import Path

import pytest

from grpo.runtime.executors.gpus import visible_gpus


def test_a_containers_gpus_count_from_0_whatever_the_host_calls_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == ()
    for name in ("nvidia3", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ("0", "1")


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        ("", ()),
        ("-1", ()),
        ("2, GPU-a,0", ("2", "GPU-a", "0")),
        ("1,-1,0", ("1",)),
    ],
)
def test_what_is_chosen_ends_at_minus_one_as_for_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, seen: tuple[str, ...]
):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus(tmp_path) == seen
