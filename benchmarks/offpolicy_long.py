"""Searches the staleness at which GRPO collapses: long rollouts, and a mixture of 16 experts.

python -m benchmarks.offpolicy_long          # runs missing cases, then prints the table
python -m benchmarks.offpolicy_long --seeds 1  # those of a seed, beside other processes
python -m benchmarks.offpolicy_long --table  # only the table

As benchmarks.offpolicy_stability, with worked solutions of over 130 tokens (offpolicy_long.yaml)
and four times as many updates. Writes results/offpolicy_long.json after every run.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.demo import ROOT
from benchmarks.offpolicy_report import collapse_table, table
from benchmarks.offpolicy_stability import SEEDS, Case, Suite, make_bases, run_cases
from grpo.modalities.tokens.modality import RoutingMode
from grpo.params.parameters import Parameters, read_params
from grpo.params.recipes import read_content
from grpo.params.yaml import dump_yaml, parse_yaml

NAME = "offpolicy_long"
SETTINGS = Path(__file__).with_suffix(".yaml")
ROUTING: tuple[RoutingMode, ...] = ("live", "replay_sampled")


def main() -> None:
    """Runs missing cases, then prints the table."""
    suite = Suite(
        name=NAME,
        params=long_params(),
        bases=make_bases(hidden=64, width=192, experts=16, positions=512),
        updates=192,
        updates_per_evaluation=64,
        learning_rate=3e-4,
    )
    runs = run_cases(suite, cases())
    print(collapse_table(runs), table(runs), sep="\n\n")


def long_params() -> Parameters:
    """Returns params.yaml with the task, the warm-up and the decoding of this benchmark."""
    own = parse_yaml(SETTINGS.read_text())
    params = read_content(ROOT / "params.yaml")
    params["task"]["families"] = own["families"]
    params["policy"]["base"]["warmup"] |= own["warmup"]
    params["policy"]["max_steps"] = own["max_steps"]
    changed = ROOT / ".work" / NAME / "params.yaml"
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text(dump_yaml(params))
    return read_params(changed)


def cases() -> Iterator[Case]:
    """Yields all runs: the stalest, then the on-policy ones, in which GSPO equals GRPO."""
    for updates in (64, 1, 16):
        for seed in SEEDS:
            for algorithm in ("grpo", "gspo") if updates > 1 else ("grpo",):
                for routing in ROUTING if updates > 1 else ROUTING[:1]:
                    yield Case(
                        model="moe",
                        routing=routing,
                        algorithm=algorithm,
                        updates_per_round=updates,
                        seed=seed,
                    )


if __name__ == "__main__":
    main()
