"""Banners and figures of training that diverged: the reason and the curves until then."""

from collections.abc import Sequence

import pandas as pd

from grpo.params.parameters import BASE, Parameters
from grpo.report.style import Canvas, Panel, color_of, styled
from grpo.runtime.artifacts.divergence import Divergence, read_divergences
from grpo.runtime.artifacts.marks import Banner

CURVES = {
    "loss": "loss",
    "grad_norm": "gradient norm before clipping",
    "kl_to_start": "KL to the iteration's first policy",
    "reward_mean": "reward",
    "learning_rate": "learning rate",
}


def read_diverged(params: Parameters) -> list[Divergence]:
    """Returns the stages of a run that diverged when they last ran.

    Raises:
      ArtifactError: If a record of a divergence is broken.
    """
    return read_divergences([BASE, *(f"train@{name}" for name in params.rounds)])


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
        axes.plot(rows["update"], values, color=color_of(0), marker="o", linewidth=1.6)
        axes.set_title(CURVES[name])
    canvas.subplots[-1].set_xlabel("update")
    return Panel(
        title=f"{diverged.stage}, until it diverged",
        caption=f"{len(rows)} updates before training diverged: {diverged.reason}.",
        svg=canvas.svg(f"diverged-{diverged.stage}", f"{diverged.stage} by update"),
    )
