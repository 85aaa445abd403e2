"""Films of a robot's rollouts: reads an iteration's tensors and replays them in the simulator."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from grpo.errors import ArtifactError, located
from grpo.modalities.action_chunks.modality import ActionChunkPolicyParams, phases_of
from grpo.modalities.action_chunks.model import ChunkShape, read_shape
from grpo.modalities.action_chunks.phases import NUM_PHASES, choose_labeller
from grpo.modalities.action_chunks.simulation.base import Ending, Moment
from grpo.modalities.action_chunks.simulation.replay import replay
from grpo.modalities.action_chunks.trajectories import (
    LAYOUT,
    ChunkTrajectory,
    restore_chunks,
    to_values,
)
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.directories import STATE, read_state
from grpo.modalities.shared.exhibits import Cell, Film, Phase, Shot, embed
from grpo.modalities.shared.packed import prompt_rows
from grpo.runtime.artifacts.media import encode_png
from grpo.runtime.artifacts.stored_iterations import IterationFiles
from grpo.runtime.artifacts.tensors import read_tensors

MAX_SHOTS = 8  # per film, the first and the last moment included
PICTURE_PIXELS = 160
DRAWN, HIGHEST = "sample_chunks_by_phase", "keep_highest_phase"  # links that select by phase


def read_films(
    artifacts: Path,
    params: RunParams[ActionChunkPolicyParams],
    files: IterationFiles,
    rollouts: pd.DataFrame,
    chosen: pd.DataFrame,
) -> list[Film | None]:
    """Returns a film of each chosen rollout of an iteration; None where the environment failed.

    Args:
      rollouts: All rollouts of the iteration.
      chosen: Has the columns row (index in `rollouts`), rollout_id and prompt (the scene).

    Raises:
      ArtifactError: If a file is missing or broken, or its tensors do not fit the others.
    """
    path = files.tensors
    shape = read_shape(artifacts / "policies" / "base")
    kept = _read_kept(artifacts / "policies" / files.round)
    tensors = read_tensors(path)
    group = torch.tensor(rollouts["group"].to_numpy())
    label = choose_labeller(params.policy.phases, params.policy.max_steps)
    with located(path):
        row = prompt_rows(LAYOUT, tensors, group)
        played, _ = restore_chunks(tensors, row, shape=shape, label=label)
    phases = phases_of(params.policy)
    films: list[Film | None] = []
    for each in chosen.to_dict("records"):
        one = played.select(torch.tensor([each["row"]]), num_steps=played.mask.shape[1])
        cells = _cells(one, phases, kept)
        films.append(_film(each["prompt"], one, cells, shape) if cells else None)
    return films


def _read_kept(policy: Path) -> list[float] | None:
    """Returns the probability per phase with which training kept a chunk at the end of a round."""
    learned = read_state(policy, policy.name).objective_state
    link = next((each for each in (DRAWN, HIGHEST) if each in learned), None)
    if link is None:
        return None
    kept = [learned[link].get(f"keep_{phase}", -1.0) for phase in range(NUM_PHASES)]
    if not all(0 <= each <= 1 for each in kept):
        raise ArtifactError(
            f"{policy / STATE}: objective_state.{link} must hold keep_0 to keep_{NUM_PHASES - 1} "
            "in [0, 1]; rerun the stage train"
        )
    if link == HIGHEST:
        highest = kept.index(max(kept))
        return [float(phase == highest) for phase in range(NUM_PHASES)]
    return kept


def _cells(one: ChunkTrajectory, phases: Sequence[Phase], kept: list[float] | None) -> list[Cell]:
    """Returns one cell per chunk of a rollout."""
    labels = one.chunks.phase[one.mask].tolist()
    return [
        Cell(
            number=number,
            phase=phases[label],
            executed=executed,
            kept=kept[label] if kept else None,
        )
        for number, (label, executed) in enumerate(zip(labels, one.executed.tolist()), start=1)
    ]


def _film(scene: str, one: ChunkTrajectory, cells: list[Cell], shape: ChunkShape) -> Film:
    """Returns the film of one rollout, without shots if the replay ends differently.

    A different processor may sum forces in a different order, so a replay can diverge.
    """
    values = to_values(one.action, shape).unflatten(1, (shape.length, shape.actions)).tolist()
    chunks = [actions[: cell.executed] for actions, cell in zip(values, cells, strict=True)]
    last = len(cells)
    shown = np.linspace(0, last, min(MAX_SHOTS, last + 1)).round().astype(int).tolist()
    again = replay(scene, chunks, shown=shown)
    if not _ends_as_stored(again.moments, cells, Ending(int(one.ending))):
        return Film(shots=[], cells=cells)
    shots = [
        Shot(
            picture=embed(encode_png(frame.transpose(2, 0, 1)), longest_pixels=PICTURE_PIXELS),
            cell=cells[number] if number < last else None,
        )
        for number, frame in zip(shown, again.frames, strict=True)
    ]
    return Film(shots=shots, cells=cells)


def _ends_as_stored(moments: Sequence[Moment], cells: list[Cell], ending: Ending) -> bool:
    """Returns whether the replay matches the stored number of actions and outcome."""
    success = Ending.SUCCESS if ending == Ending.SUCCESS else None
    stored = [*((cell.executed, None) for cell in cells[:-1]), (cells[-1].executed, success)]
    return [(each.executed, each.ending) for each in moments] == stored
