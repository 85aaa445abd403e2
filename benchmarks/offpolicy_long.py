"""Tests whether stale long rollouts make GRPO collapse, with a mixture of 16 experts.

python -m benchmarks.offpolicy_long          # runs missing cases, then prints the table
python -m benchmarks.offpolicy_long --seeds 1  # those of a seed, beside other processes
python -m benchmarks.offpolicy_long --table  # only the table
python -m benchmarks.offpolicy_long --rates  # instead, one on-policy run per learning rate

As benchmarks.offpolicy_stability, with worked solutions of over 130 tokens (offpolicy_long.yaml)
and four times as many updates. Writes results/offpolicy_long.json after every run, or
results/offpolicy_long_rates.json.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.demo import RESULTS, ROOT, machine
from benchmarks.offpolicy_report import collapse_table, rates_table, table
from benchmarks.offpolicy_stability import (
    SEEDS,
    Case,
    Suite,
    make_bases,
    make_parser,
    prepare,
    run,
    run_cases,
    write_lines,
)
from grpo.modalities.tokens.modality import RoutingMode
from grpo.params.parameters import Parameters, read_params
from grpo.params.recipes import read_content
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.runtime.artifacts.files import read_json

NAME = "offpolicy_long"
RATES = (3e-4, 1e-4, 3e-5)
STALEST = 64  # updates per round
RATES_OUT = RESULTS / f"{NAME}_rates.json"
SETTINGS = Path(__file__).with_suffix(".yaml")
KINDS: tuple[tuple[str, RoutingMode, int], ...] = (
    ("grpo", "live", STALEST),
    ("grpo", "replay_sampled", STALEST),
    ("gspo", "live", STALEST),
    ("grpo", "live", 1),
)


def main() -> None:
    """Runs missing cases, then prints the table."""
    suite = Suite(
        name=NAME,
        params=long_params(),
        bases=make_bases(hidden=64, width=192, experts=16, positions=512),
        updates=192,
        updates_per_evaluation=64,
        learning_rate=3e-5,  # of RATES, the largest without a loss on fresh rollouts
    )
    parser = make_parser(suite)
    parser.add_argument("--rates", action="store_true", help="one run per learning rate instead")
    chosen = parser.parse_args()
    if chosen.rates:
        print(rates_table(run_rates(suite)))
        return
    runs = run_cases(suite, cases(), chosen)
    print(collapse_table(runs), table(runs), sep="\n\n")


def run_rates(suite: Suite) -> dict[str, Any]:
    """Runs GRPO on fresh rollouts with each learning rate that the results lack; returns them."""
    case = Case(model="moe", routing="live", algorithm="grpo", updates_per_round=1, seed=0)
    for rate in RATES:
        found = read_json(RATES_OUT)["runs"] if RATES_OUT.exists() else {}
        if str(rate) not in found:
            bench = prepare(replace(suite, learning_rate=rate), case.model)
            found[str(rate)] = run(bench, case)
            command = f"python -m benchmarks.{NAME} --rates"
            write_lines(RATES_OUT, {"command": command, "machine": machine()}, found)
    results: dict[str, Any] = read_json(RATES_OUT)
    return results


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
    """Yields all runs: the stalest, then those on fresh rollouts, in which GSPO equals GRPO."""
    for algorithm, routing, updates in KINDS:
        for seed in SEEDS:
            yield Case(
                model="moe",
                routing=routing,
                algorithm=algorithm,
                updates_per_round=updates,
                seed=seed,
            )


if __name__ == "__main__":
    main()
