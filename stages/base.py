"""Makes the base policy: a fresh model warmed up on solutions, or an import."""

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from grpo.artifacts.files import atomic_path, write_json
from grpo.artifacts.tables import WARMUP, read_table, write_csv
from grpo.artifacts.usage import Usage
from grpo.build.bases.making import build_base
from grpo.build.machine import prepare_machine
from grpo.params.parameters import read_params
from grpo.types import Cost
from grpo.warmup import WarmupUpdate
from stages.entry import run
from stages.progress import shown


def main(usage: Usage, warmup: Path, data: Path, policy_out: Path, training_out: Path) -> None:
    """Writes the policy directory and the warm-up's updates."""
    params = read_params()
    prepare_machine(params.machine)
    with usage.part("load"):
        base = build_base(params, data)
    updates: list[WarmupUpdate] = []
    if base.num_updates:
        with usage.part("warm-up"), shown("warm-up") as progress:
            for each in base.warm_up(read_table(warmup, WARMUP)):
                updates.append(each)
                progress(len(updates), base.num_updates)
    with atomic_path(policy_out) as temporary:
        base.save(temporary)
    with atomic_path(training_out) as temporary:
        temporary.mkdir()
        rows = [(each.update, each.loss, each.learning_rate) for each in updates]
        frame = pd.DataFrame(rows, columns=["update", "loss", "learning_rate"])
        write_csv(temporary / "updates.csv", frame)
        cost = sum((each.cost for each in updates), Cost())
        write_json(temporary / "summary.json", {"cost": asdict(cost), "updates": len(updates)})


if __name__ == "__main__":
    run(main, stage="base")
