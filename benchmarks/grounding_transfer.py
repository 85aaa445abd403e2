"""Measures what two arms of benchmarks.grounding_methods learn on the prompt that each trains.

python -m benchmarks.grounding_transfer 0 1 2 3 4   # runs missing stages, then writes the results
python -m benchmarks.grounding_transfer             # prints the table of the results

The arm grpo trains questions; the arm revision trains questions that are followed by a first
answer. Both policies are asked both, on the prompts of the evaluation; the first answers are the
base's. The runs are those of benchmarks.grounding_methods under .work/; remove that folder after a
change of code. Writes results/grounding_transfer.json.
"""

from contextlib import AbstractContextManager, chdir
from pathlib import Path
from typing import Any

from benchmarks.grounding_methods import train_arms
from benchmarks.grounding_revisions import Draw, revision, sampler
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds
from grpo.params.parameters import BASE, Parameters, read_params
from grpo.runtime.artifacts.tables import PROMPTS, SCORE, read_table
from grpo.runtime.markdown import markdown_table
from grpo.runtime.seeds import derive_seed
from grpo.sampling.revision import ask_for_revisions, sample_first_answers

ARMS = ("grpo", "revision")
SETTINGS = {"rollouts": 8}
KINDS = QUESTION, REVISION = "question", "question and first answer"
IOU = SCORE + "boxes"
DIFFERENCES = {  # of gains: the first less the second
    "revision: revised - asked": (("revision", REVISION), ("revision", QUESTION)),
    "grpo: asked - revised": (("grpo", QUESTION), ("grpo", REVISION)),
    "revised by revision - asked of grpo": (("revision", REVISION), ("grpo", QUESTION)),
}
Scores = dict[str, dict[str, float]]  # mean IoU by policy and prompt


def main() -> None:
    """Runs the given seeds and prints the table of all finished seeds."""
    results = record_seeds(
        "grounding_transfer", SETTINGS, run_seed, lambda runs: {"summary": summarize(runs)}
    )
    print(table(results))


def run_seed(seed: int) -> Scores:
    """Returns the IoU of the base and of both trained policies on both prompts."""
    with chdir(train_arms(seed, ARMS)):
        return measure(read_params(), seed)


def measure(params: Parameters, seed: int) -> Scores:
    """Returns the scores, in a workspace whose rounds have been trained."""
    tasks = Path("artifacts/prompts/eval.parquet")
    prompts = read_table(tasks, PROMPTS).assign(rollouts=SETTINGS["rollouts"])
    last = {arm: params.rounds_of(arm)[-1] for arm in ARMS}

    def sampler_of(policy: str) -> AbstractContextManager[Draw]:
        # Of both arms the rounds sample alike.
        return sampler(params, last["revision"], tasks, Path("artifacts/policies") / policy)

    with sampler_of(BASE) as draw:
        batch, rewards = draw(prompts.assign(rollouts=1), derive_seed(seed, "first"), None)
    first = sample_first_answers(
        prompts, revision(), sample=lambda _: batch, judge=lambda: rewards, seed=seed
    )
    asked = {QUESTION: prompts, REVISION: ask_for_revisions(prompts, first, revision())}
    scores: Scores = {}
    for name, policy in {BASE: BASE, **last}.items():
        with sampler_of(policy) as draw:
            scores[name] = {
                kind: float(draw(each, derive_seed(seed, kind), None)[1][IOU].mean())
                for kind, each in asked.items()
            }
    return scores


def summarize(runs: dict[str, Scores]) -> dict[str, Any]:
    """Returns means over seeds with 95 % t intervals: of the base, of gains, and of differences."""
    scores = runs.values()
    summary: dict[str, Any] = {
        BASE: {kind: mean_interval([run[BASE][kind] for run in scores]) for kind in KINDS}
    }
    for arm in ARMS:
        summary[arm] = {
            kind: mean_interval([_gain(run, arm, kind) for run in scores]) for kind in KINDS
        }
    for name, (first, second) in DIFFERENCES.items():
        summary[name] = mean_interval([_gain(run, *first) - _gain(run, *second) for run in scores])
    return summary


def _gain(scores: Scores, arm: str, kind: str) -> float:
    return scores[arm][kind] - scores[BASE][kind]


def table(results: dict[str, Any]) -> str:
    """Returns the Markdown table of docs/methods/group_revision.md."""
    found = results["summary"]
    rows = [["IoU of the base", *(in_words(found[BASE][kind], ".3f") for kind in KINDS)]]
    for arm in ARMS:
        rows.append([f"gain of `{arm}`", *(in_words(found[arm][kind], "+.3f") for kind in KINDS)])
    return markdown_table(["", "asked the question", "asked to revise the base's answer"], rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what docs/methods/group_revision.md says of the differences."""
    return [in_words(results["summary"][name], "+.3f") for name in DIFFERENCES]


if __name__ == "__main__":
    main()
