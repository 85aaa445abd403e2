"""Compares Group Revision with GRPO from bases that saw wrong answers of the kinds they give.

python -m benchmarks.grounding_varied 5 6 7 8 9   # runs missing stages, then writes the results
python -m benchmarks.grounding_varied             # prints the table of the results

Arms, reward and model are those of benchmarks.grounding_accuracy; `revised_pairs` of the warm-up
differs. Writes results/grounding_varied.json.
"""

from benchmarks.grounding_accuracy import read_accuracy_spec
from benchmarks.grounding_methods import record, table

VARIED = {"right": 0.3, "shift": 12, "errors": "varied"}  # of revised_pairs


def main() -> None:
    """Runs the given seeds and prints the table of all finished seeds."""
    print(table(record("grounding_varied", read_accuracy_spec(VARIED))))


if __name__ == "__main__":
    main()
