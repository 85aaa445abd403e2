"""Compares Group Revision with GRPO where the reward is the paper's: an answer is right or wrong.

python -m benchmarks.grounding_accuracy 0 1 2 3 4   # runs missing stages, then writes the results
python -m benchmarks.grounding_accuracy             # prints the table of the results

Arms and model are those of benchmarks.grounding_methods, with two changes: the reward is 1 if the
IoU is at least 0.5, and an object of the answers that the warm-up shows is moved much farther. The
runs of a seed are under .work/ and resume after an interruption; remove that folder after a change
of code. Writes results/grounding_accuracy.json.
"""

from typing import Any

from benchmarks.grounding_methods import (
    PARTS,
    REFERENCE,
    gains_at_equal_flops,
    read_spec,
    record,
    table,
)
from benchmarks.intervals import in_words, mean_interval
from grpo.report.words import listed

ARMS = ("grpo", "published", "mixed")
FAR = {"right": 0.0, "shift": 24}  # of revised_pairs; an image has 48 pixels


def main() -> None:
    """Runs the given seeds and prints the table of all finished seeds."""
    print(table(record("grounding_accuracy", read_accuracy_spec(FAR))))


def read_accuracy_spec(changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the arms, and what differs from the recipe.

    Args:
      changes: Of `revised_pairs`.
    """
    spec = read_spec()
    arms = {name: spec["arms"][name] for name in ARMS}
    pairs = {**spec["revised_pairs"], **changes}
    return {**spec, "arms": arms, "revised_pairs": pairs, "reward": {"maximize": "outcome"}}


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what the page says of the revision and of single seeds."""
    gains = [gains_at_equal_flops(run) for run in results["runs"].values()]
    name = f"greedy IoU, {PARTS[1]}"
    (revision,) = {each["revision"][:7] for each in results["measured"].values()}
    found = [f"measured at {revision}"]
    for arm in ARMS[1:]:
        differences = [each[arm][name] - each[REFERENCE][name] for each in gains]
        found.append(f"{listed([f'{each:+.3f}' for each in differences])} for `{arm}`")
    return found


def errors(results: dict[str, Any]) -> list[str]:
    """Returns by how much the error of revisions exceeds that of first answers, by arm."""
    found = []
    for arm in ARMS[1:]:
        by_round = zip(*(run[arm][1:] for run in results["runs"].values()))
        first, second = (
            mean_interval([each["error"] - each["first_error"] for each in points])
            for points in by_round
        )
        found.append(f"{in_words(first, '+.3f')} and {in_words(second, '+.3f')} for `{arm}`")
    return found


if __name__ == "__main__":
    main()
