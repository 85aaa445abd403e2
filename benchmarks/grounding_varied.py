"""Compares Group Revision with GRPO from bases that saw wrong answers of the kinds they give.

python -m benchmarks.grounding_varied 5 6 7 8 9   # runs missing stages, then writes the results
python -m benchmarks.grounding_varied             # prints the table of the results

Arms, reward and model are those of benchmarks.grounding_accuracy; `revised_pairs` of the warm-up
differs. Writes results/grounding_varied.json.
"""

from benchmarks.demo import ROOT
from benchmarks.grounding_accuracy import read_accuracy_spec
from benchmarks.grounding_methods import run_seed, summarize, table
from benchmarks.seeds import record_seeds

WORK = ROOT / ".work" / "grounding_varied"
VARIED = {"right": 0.3, "shift": 12, "errors": "varied"}  # of revised_pairs


def main() -> None:
    """Runs the given seeds and prints the table of all finished seeds."""
    spec = read_accuracy_spec(VARIED)
    results = record_seeds(
        "grounding_varied",
        spec,
        lambda seed: run_seed(seed, spec, WORK),
        lambda runs: {"summary": summarize(runs)},
    )
    print(table(results))


if __name__ == "__main__":
    main()
