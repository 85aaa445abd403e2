"""Makes the base policy: a fresh model warmed up on solutions, or an import."""

from dataclasses import asdict
from pathlib import Path

import pandas as pd
from torch import nn

from grpo.artifacts.files import atomic_path, write_csv, write_json
from grpo.artifacts.tables import WARMUP, read_table
from grpo.artifacts.usage import Usage
from grpo.build.policies import make_base, prepare_machine, warmup_settings
from grpo.params import read_params
from grpo.policies.storage import save_base
from grpo.types import Cost
from grpo.warmup import WarmupUpdate, warm_up
from stages.entry import run
from stages.progress import shown


def main(usage: Usage, warmup: Path, data: Path, policy_out: Path, training_out: Path) -> None:
    """Writes the policy directory and the warm-up's updates."""
    params = read_params()
    prepare_machine(params.machine)
    with usage.part("load"):
        model, tokenizer = make_base(params, data)
        nn.Module.to(model, params.machine.device)
    settings = warmup_settings(params)
    updates: list[WarmupUpdate] = []
    if settings is not None:
        solutions = read_table(warmup, WARMUP)
        pairs = list(zip(solutions["prompt"], solutions["solution"]))
        with usage.part("warm-up"), shown("warm-up") as progress:
            for each in warm_up(model, tokenizer, pairs, settings):
                updates.append(each)
                progress(len(updates), settings.updates)
    with atomic_path(policy_out) as temporary:
        save_base(temporary, model, tokenizer)
    with atomic_path(training_out) as temporary:
        temporary.mkdir()
        rows = [(each.update, each.loss, each.learning_rate) for each in updates]
        frame = pd.DataFrame(rows, columns=["update", "loss", "learning_rate"])
        write_csv(temporary / "updates.csv", frame)
        cost = sum((each.cost for each in updates), Cost())
        write_json(temporary / "summary.json", {"cost": asdict(cost), "updates": len(updates)})


if __name__ == "__main__":
    run(main, stage="base")
