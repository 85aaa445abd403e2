"""Estimates memory, seconds, traffic, storage and price of the runs of inputs.yaml.

python -m benchmarks.scale             # from stored measurements: writes results/scale.json
python -m benchmarks.scale --measure   # measures first: two minutes, 6 GB of memory

Needs no GPU. Prints the tables of docs/scale.md.
"""

import argparse
from typing import Any

from benchmarks.allocation_tokens import share_to_reach
from benchmarks.demo import RESULTS
from benchmarks.scale.inputs import read_inputs
from benchmarks.scale.measure import measure
from benchmarks.scale.results import work_out
from benchmarks.scale.tables import all_tables
from grpo.runtime.artifacts.files import read_json, write_json

OUT = RESULTS / "scale.json"
ALLOCATION = RESULTS / "allocation_tokens.json"
ALLOCATED = "composed"
REFERENCES = ("drop_uniform", "plain")  # the first is the uniform GRPO of the runs


def main() -> None:
    """Writes the results and prints their tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--measure", action="store_true")
    inputs = read_inputs()
    is_new = parser.parse_args().measure
    measured = measure(inputs["runs"]) if is_new else read_json(OUT)["measured"]
    savings = read_savings()
    results = {
        "command": "python -m benchmarks.scale --measure",
        "measured": measured,
        "savings": savings,
        "worked_out": work_out(inputs, measured, savings),
    }
    write_json(OUT, results)
    print(*all_tables(inputs, read_json(OUT)), sep="\n\n")


def read_savings() -> dict[str, Any]:
    """Returns the savings in steps by allocation on the default task."""
    runs = read_json(ALLOCATION)["runs"].values()
    reference, _ = REFERENCES
    ends = [run[reference][-1] for run in runs]
    shares = [end["trained_steps"] / end["sampled_steps"] for end in ends]
    return {
        "trained_share": sum(shares) / len(shares),
        "arms": {
            f"{ALLOCATED} against {each}": {
                kind: share_to_reach(
                    [run[ALLOCATED] for run in runs], [run[each] for run in runs], kind
                )
                for kind in ("sampled_steps", "trained_steps")
            }
            for each in REFERENCES
        },
    }


if __name__ == "__main__":
    main()
