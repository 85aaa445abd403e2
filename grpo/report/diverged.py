"""Banners and figures of training that diverged: the reason and the curves until then."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from grpo.errors import ArtifactError
from grpo.params.parameters import BASE, Parameters
from grpo.report.style import Canvas, Panel, color_of, styled
from grpo.runtime.artifacts.divergence import DIVERGED, REASON, UPDATES
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.marks import Banner

CURVES = {
    "loss": "loss",
    "grad_norm": "gradient norm before clipping",
    "kl_to_start": "KL to the iteration's first policy",
    "reward_mean": "reward",
    "learning_rate": "learning rate",
}


class Divergence(NamedTuple):
    """The reason why a stage's training diverged, and the rows of updates.csv before that."""

    stage: str  # full name, e.g. train@sgpo-2
    reason: str
    updates: pd.DataFrame


def read_diverged(params: Parameters) -> list[Divergence]:
    """Returns the stages of a run that diverged when they last ran.

    Raises:
      ArtifactError: If a record of a divergence is broken.
    """
    return read_divergences([BASE, *(f"train@{name}" for name in params.rounds)])


def read_divergences(stages: Iterable[str]) -> list[Divergence]:
    """Returns the records of the given stages that diverged in their last run in this workspace.

    Raises:
      ArtifactError: If a file is broken.
    """
    return [_read(stage) for stage in stages if (DIVERGED / stage).is_dir()]


def _read(stage: str) -> Divergence:
    directory = DIVERGED / stage
    content = read_json(directory / REASON)
    try:
        updates = pd.read_csv(directory / UPDATES)
    except pd.errors.EmptyDataError:  # the first update diverged
        updates = pd.DataFrame()
    except (FileNotFoundError, pd.errors.ParserError, UnicodeDecodeError) as error:
        message = f"{directory / UPDATES}: must be CSV, {error}; delete {directory}"
        raise ArtifactError(message) from None
    return Divergence(stage, str(content["reason"]), updates)


def add_banners(diverged: Sequence[Divergence], known: Sequence[Banner]) -> list[Banner]:
    """Returns `known` after one banner per divergence whose reason `known` does not state."""
    said = " ".join(each.text for each in known)
    own = [
        Banner(title=f"{each.stage} diverged", text=f"{each.reason}.")
        for each in diverged
        if each.reason not in said
    ]
    return [*own, *known]


def draw_diverged(diverged: Sequence[Divergence]) -> list[Panel]:
    """Returns a figure per diverged stage that finished at least one update."""
    with styled():
        return [_draw(each) for each in diverged if len(each.updates)]


def _draw(diverged: Divergence) -> Panel:
    rows = diverged.updates
    drawn = [name for name in CURVES if name in rows]
    canvas = Canvas([1.75] * len(drawn), share_x=True)
    for axes, name in zip(canvas.subplots, drawn, strict=True):
        values = pd.to_numeric(rows[name], errors="coerce")
        updates = rows["update"].tolist()
        tips = [f"update {n}, {value:.3g}" for n, value in zip(updates, values, strict=True)]
        style: dict[str, Any] = {"color": color_of(0), "marker": "o", "width": 1.6}
        canvas.curve(axes, updates, values.tolist(), label=CURVES[name], tips=tips, **style)
        axes.set_title(CURVES[name])
    canvas.subplots[-1].set_xlabel("update")
    return Panel(
        title=f"{diverged.stage}, until it diverged",
        caption=f"{len(rows)} updates before training diverged: {diverged.reason}.",
        svg=canvas.svg(f"diverged-{diverged.stage}", f"{diverged.stage} by update"),
    )
