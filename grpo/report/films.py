"""What a film of a robot's rollout is: some pictures, and a cell for every chunk of actions."""

import itertools
from dataclasses import dataclass

from grpo.modalities.action_chunks.phases import PHASE_NAMES
from grpo.params.parameters import Parameters
from grpo.report.pictures import Picture

# By labeller: what the gripper does in colors of Okabe and Ito (2008), time from dark to light.
OTHER_COLORS = ("#56b4e9", "#e69f00", "#d55e00", "#cc79a7", "#8c959f")
PHASE_COLORS: dict[tuple[str, ...], tuple[str, ...]] = {
    tuple(PHASE_NAMES["gripper"]): OTHER_COLORS,
    tuple(PHASE_NAMES["time"]): ("#5b4fa8", "#3f7fb8", "#2fa39a", "#7cc25b", "#e5c72e"),
}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What chunks are told apart by, as the legend shows it."""

    name: str
    color: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One chunk of a rollout."""

    number: int  # from 1
    phase: Phase
    executed: int  # actions
    kept: float | None  # how likely, 1 being the likeliest phase; None: all phases alike


@dataclass(frozen=True, kw_only=True)
class Shot:
    """What a scene looked like before a chunk, or at the end."""

    picture: Picture
    cell: Cell | None  # None: at the end


@dataclass(frozen=True, kw_only=True)
class Film:
    """One rollout: some shots in time, and all chunks."""

    shots: list[Shot]  # none if it ends otherwise when it is played again
    cells: list[Cell]

    @property
    def numbers(self) -> set[int]:
        """The chunks before which there is a shot."""
        return {each.cell.number for each in self.shots if each.cell}

    @property
    def summary(self) -> str:
        """The phases as they followed, to be read aloud: "2 of approach, 7 of active-grip"."""
        runs: list[tuple[str, int]] = []
        for cell in self.cells:
            name, count = runs[-1] if runs else ("", 0)
            if name == cell.phase.name:
                runs[-1] = (name, count + 1)
            else:
                runs.append((cell.phase.name, 1))
        return ", ".join(f"{count} of {name}" for name, count in runs)


def phases_of(params: Parameters) -> list[Phase]:
    """Returns the phases of the policy's chunks; none if its steps are no chunks."""
    names = params.modality.phase_names(params.policy)
    colors = PHASE_COLORS.get(names, itertools.cycle(OTHER_COLORS))
    return [Phase(name=name, color=color) for name, color in zip(names, colors)]
