"""Runs the pipeline's stages in one process, which avoids the start-up time of each stage."""

import importlib
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dvc.repo import Repo
from dvc.stage import Stage

from grpo.params.yaml import dump_yaml
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.usage import Usage

ROOT = Path(__file__).parents[1]
SHORT_ROLLOUTS = ROOT / "recipes" / "reasoning-short.yaml"  # of eight tokens
NO_RESULT = ("report", "lineage")
CPU_SECONDS = Path(".work/cpu_seconds.json")
PEAK_BYTES = Path(".work/peak_bytes.json")
PART_SECONDS = Path(".work/part_seconds.json")
SAMPLING_PARTS, JUDGING_PARTS = ("sampling", "simulation", "waiting"), ("judging",)
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def make_workspace(target: Path, params: dict[str, Any]) -> None:
    """Copies code, data and dvc.yaml into a folder and writes `params`; keeps its artifacts."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("grpo", "plugins", "stages", "data"):
        shutil.rmtree(target / name, ignore_errors=True)
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "dvc.yaml", target / "dvc.yaml")
    (target / "params.yaml").write_text(dump_yaml(params))
    if not (target / ".dvc").exists():
        subprocess.run(["git", "init", "--quiet"], cwd=target, check=True)
        (target / ".dvc").mkdir()  # all that reading dvc.yaml takes


def run_stages(workspace: Path, skipped: Collection[str] = ()) -> dict[str, float]:
    """Runs, in topological order, every stage whose outputs are missing.

    Args:
      skipped: Full names of stages to skip, e.g. evaluate@uniform-1.

    Returns:
      The CPU seconds of each stage and its child processes, including earlier calls.
    """
    with _inside(workspace):
        seconds: dict[str, float] = read_json(CPU_SECONDS) if CPU_SECONDS.exists() else {}
        for name, command, outs in commands_in_order(Path()):
            if name.partition("@")[0] in NO_RESULT or name in skipped:
                continue
            if all(out.exists() for out in outs):
                continue
            _, _, module, *paths = command.split()
            main = importlib.import_module(module).main
            reset_peak()
            start = _cpu_seconds()
            usage = Usage()
            main(usage, *(Path(path) for path in paths))
            seconds[name] = _cpu_seconds() - start
            write_json(CPU_SECONDS, seconds)
            parts = _read_by_stage(PART_SECONDS)
            write_json(PART_SECONDS, {**parts, name: usage.seconds_by_part})
            write_json(PEAK_BYTES, {**peak_bytes(Path()), name: resident_peak()})
        return seconds


def commands_in_order(workspace: Path) -> list[tuple[str, str, list[Path]]]:
    """Returns name, command and outputs of every stage in topological order."""
    with Repo(workspace) as repo:
        graph = repo.index.graph
        order: list[Stage] = []
        waiting = list(graph)
        while waiting:
            ready = [each for each in waiting if not set(graph.successors(each)) - set(order)]
            order += ready
            waiting = [each for each in waiting if each not in order]
        return [(each.name, each.cmd, [Path(out.def_path) for out in each.outs]) for each in order]


def peak_bytes(workspace: Path) -> dict[str, int]:
    """Returns the peak resident memory of the process during each stage that ran."""
    return _read_by_stage(workspace / PEAK_BYTES)


@dataclass(frozen=True, kw_only=True)
class RoundSeconds:
    """CPU seconds of a round by kind of work, of all its iterations."""

    sampling: float
    judging: float
    training: float

    @property
    def total(self) -> float:
        """All CPU seconds of the round."""
        return self.sampling + self.judging + self.training


def round_seconds(workspace: Path, cpu_seconds: Mapping[str, float], name: str) -> RoundSeconds:
    """Returns the CPU seconds of a round.

    Those of train@ are divided by the measured seconds of its parts: the iterations after the first
    sample and judge in it.

    Args:
      cpu_seconds: By stage, from `run_stages`.
    """
    parts: dict[str, float] = _read_by_stage(workspace / PART_SECONDS).get(f"train@{name}", {})
    whole = sum(parts.values()) or 1.0
    train = cpu_seconds[f"train@{name}"]
    later = [
        train * sum(parts.get(each, 0.0) for each in group) / whole
        for group in (SAMPLING_PARTS, JUDGING_PARTS)
    ]
    return RoundSeconds(
        sampling=cpu_seconds[f"rollout@{name}"] + later[0],
        judging=cpu_seconds[f"score@{name}"] + later[1],
        training=train - sum(later),
    )


def _read_by_stage(path: Path) -> dict[str, Any]:
    """Returns the content of a file that `run_stages` wrote; empty if there is none."""
    found: dict[str, Any] = read_json(path) if path.exists() else {}
    return found


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its finished child processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def reset_peak() -> None:
    """Resets the peak resident memory of this process to its current resident memory."""
    CLEAR_REFS.write_text("5")


def resident_peak() -> int:
    """Returns the peak resident memory of this process in bytes."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


@contextmanager
def _inside(workspace: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(workspace)
    try:
        yield
    finally:
        os.chdir(before)
