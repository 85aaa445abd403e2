"""Creates the base policy: a fresh model after a supervised warm-up, or an imported model."""

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from grpo.params.manifests import require_described
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.divergence import curves_kept
from grpo.runtime.artifacts.files import atomic_path, write_json
from grpo.runtime.artifacts.tables import WARMUP, read_table, write_csv
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.machine import prepare_machine
from grpo.types import Cost
from grpo.wiring.policies import build_base
from stages.entry import run
from stages.progress import shown

CURVES = ["update", "loss", "learning_rate"]


def main(
    usage: Usage, warmup: Path, described: Path, data: Path, policy_out: Path, training_out: Path
) -> None:
    """Writes the policy directory and the warm-up's updates.

    Args:
      described: Manifest of files in `data`, written by the stage check.
    """
    params = read_params()
    require_described(described, params, data, "base")
    prepare_machine(params.machine)
    with usage.part("load"):
        base = build_base(params, data)
    rows: list[dict[str, float]] = []
    cost = Cost()
    if base.num_updates:
        with (
            curves_kept("base", rows),
            usage.part("warm-up"),
            shown("warm-up") as progress,
        ):
            for each in base.warm_up(read_table(warmup, WARMUP)):
                rows.append({name: getattr(each, name) for name in CURVES})
                cost += each.cost
                progress(len(rows), base.num_updates)
    with atomic_path(policy_out) as temporary:
        base.save(temporary)
    with atomic_path(training_out) as temporary:
        temporary.mkdir()
        write_csv(temporary / "updates.csv", pd.DataFrame(rows, columns=CURVES))
        write_json(temporary / "summary.json", {"cost": asdict(cost), "updates": len(rows)})


if __name__ == "__main__":
    run(main, stage="base")
