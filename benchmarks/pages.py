"""Writes the tables of measured numbers into the pages of docs/.

python -m benchmarks.pages      # replaces every table whose results file has changed

tests/test_docs.py compares tables and the numbers in text with the results.
"""

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks import (
    allocation_batches,
    allocation_chunks,
    allocation_denoising,
    allocation_pretrained,
    allocation_repeat,
    allocation_sgpo,
    allocation_tokens,
    bfloat16,
    chunk_costs,
    demo,
    denoising_steps,
    faults,
    first_run,
    from_nothing,
    grounding_accuracy,
    grounding_methods,
    grounding_revisions,
    grounding_transfer,
    iteration_kills,
    memory,
    offpolicy_report,
    overhead,
    recipe_claims,
    rollout_throughput,
    sampling_batches,
    scaling_sampling,
    scaling_training,
    staleness,
    step_profile,
    translation,
    translation_dates,
    translation_guards,
    vllm_sampling,
)
from benchmarks.demo import RESULTS, ROOT
from benchmarks.gpu import page as gpu_page
from benchmarks.peer_trl import __main__ as peer_trl
from benchmarks.peer_trl import tune
from benchmarks.peer_trl_run import __main__ as peer_trl_run
from benchmarks.peer_trl_run import replay
from benchmarks.peer_trl_run.settings import DEFAULT
from benchmarks.scale import tables as scale_tables
from benchmarks.seeds import read_folder
from grpo.runtime.artifacts.files import read_json, write_bytes

DOCS = ROOT / "docs"
IOU = {"IoU": "score.boxes", "greedy IoU": "greedy_score.boxes"}  # of the judge `boxes`
# Results, the table that is made of them, and its page; tables with equal titles in page order.
TABLES: list[tuple[str, Callable[[dict[str, Any]], str], str]] = [
    ("first_run", first_run.solved_table, "results"),
    ("demo", demo.table, "results"),
    ("demo", demo.reference_table, "results"),
    ("demo", demo.times_table, "results"),
    ("reasoning-short", demo.table, "results"),
    ("reasoning-short", demo.times_table, "results"),
    ("reasoning-smollm2", demo.table, "results"),
    ("reasoning-smollm2", demo.reference_table, "results"),
    ("allocation_pretrained", allocation_pretrained.table, "results"),
    ("reasoning-short", demo.reference_table, "results"),
    ("stale_updates", demo.reference_table, "results"),
    ("glyphs", demo.table, "denoising"),
    ("demo", recipe_claims.costs_table, "recipes"),
    ("from_nothing", from_nothing.table, "recipes"),
    ("demo", demo.advice_table, "advice"),
    ("clips", demo.table, "denoising"),
    ("manipulation-pixels", demo.table, "action-chunks"),
    (
        "offpolicy_stability",
        lambda found: offpolicy_report.table(found["runs"]),
        "offpolicy_stability",
    ),
    ("offpolicy_long_rates", offpolicy_report.rates_table, "offpolicy_stability"),
    (
        "offpolicy_long",
        lambda found: offpolicy_report.collapse_table(found["runs"]),
        "offpolicy_stability",
    ),
    (
        "offpolicy_long",
        lambda found: offpolicy_report.table(found["runs"]),
        "offpolicy_stability",
    ),
    ("allocation_denoising", lambda found: allocation_denoising.table(found["runs"]), "denoising"),
    ("denoising_steps", lambda found: denoising_steps.table(found["cases"]), "denoising"),
    ("allocation_chunks", allocation_chunks.table, "action-chunks"),
    ("chunk_costs", chunk_costs.table, "action-chunks"),
    ("rollout_throughput", rollout_throughput.table, "action-chunks"),
    ("vllm_sampling", vllm_sampling.table, "own-model"),
    ("sampling_batches", sampling_batches.table, "allocation_tokens"),
    ("allocation_batches", allocation_batches.table, "allocation_tokens"),
    ("allocation_repeat", allocation_repeat.table, "allocation_tokens"),
    ("allocation_sgpo", allocation_sgpo.table, "allocation_tokens"),
    ("allocation_tokens", allocation_tokens.targets_table, "allocation_tokens"),
    ("allocation_tokens", allocation_tokens.table, "allocation_tokens"),
    ("allocation_tokens", allocation_tokens.reach_table, "allocation_tokens"),
    ("allocation_tokens", allocation_tokens.spending_table, "allocation_tokens"),
    ("overhead", overhead.table, "pipeline"),
    ("memory", memory.table, "memory"),
    ("memory", memory.kept_table, "memory"),
    ("scaling_training", scaling_training.table, "scale"),
    ("scaling_sampling", scaling_sampling.table, "scale"),
    ("faults", faults.table, "faults"),
    ("step_profile", step_profile.table, "speed"),
    ("step_profile", step_profile.limits, "speed"),
    ("peer_trl", peer_trl.table, "speed"),
    ("bfloat16", bfloat16.gains_table, "speed"),
    ("bfloat16", bfloat16.drift_table, "speed"),
    ("peer_trl_tuning", tune.table, "speed"),
    ("peer_trl_run/0.2M", peer_trl_run.table, "speed"),
    ("peer_trl_run/10.4M", peer_trl_run.table, "speed"),
    ("peer_trl_run/10.4M-half", peer_trl_run.table, "speed"),
    ("peer_trl_run/*", peer_trl_run.shares_table, "../README"),
    ("iteration_kills", iteration_kills.table, "faults"),
    ("staleness", staleness.table, "iterations"),
    ("translation", demo.table, "own-model"),
    ("grounding", demo.table, "own-model"),
    ("grounding", demo.judges_table, "own-model"),
    ("grounding", lambda found: demo.families_table(found, IOU), "own-model"),
    ("translation_methods", translation.gains_table, "translation"),
    ("translation_methods", translation.pairs_table, "translation"),
    ("translation_methods", translation.languages_table, "translation"),
    ("translation_dates", translation_dates.scores_table, "translation"),
    ("translation_dates", translation_dates.differences_table, "translation"),
    ("translation_dates", translation_dates.influence_table, "translation"),
    ("translation_dates", translation.languages_table, "translation"),
    ("translation_guards", translation_guards.scores_table, "translation"),
    ("translation_guards", translation_guards.differences_table, "translation"),
    ("grounding_methods", grounding_methods.table, "methods/group_revision"),
    ("grounding_methods", grounding_methods.revisions_table, "methods/group_revision"),
    ("grounding_revisions", grounding_revisions.table, "methods/group_revision"),
    ("grounding_transfer", grounding_transfer.table, "methods/group_revision"),
    ("grounding_accuracy", grounding_methods.table, "methods/group_revision"),
    ("grounding_varied", grounding_methods.table, "methods/group_revision"),
    ("grounding_varied", grounding_methods.revisions_table, "methods/group_revision"),
]


# Results, the words that follow from them, and the page whose text has these words.
CLAIMS: list[tuple[str, Callable[[dict[str, Any]], list[str]], str]] = [
    (f"gpu/{gpu_page.H100}", lambda found: gpu_page.claims(found)[:1], "scale"),
    (f"gpu/{gpu_page.H100}", lambda found: gpu_page.claims(found)[1:2], "../CHANGELOG"),
    (f"gpu/{gpu_page.H100}", lambda found: gpu_page.claims(found)[2:], "own-model"),
    ("gpu/*", gpu_page.twins_claims, "../README"),
    ("gpu_before", gpu_page.before_claims, "../CHANGELOG"),
    ("grounding_methods", grounding_methods.claims, "methods/group_revision"),
    ("grounding_accuracy", grounding_accuracy.claims, "methods/group_revision"),
    ("grounding_accuracy", grounding_accuracy.errors, "methods/group_revision"),
    ("grounding_varied", grounding_accuracy.claims, "methods/group_revision"),
    ("grounding_varied", grounding_accuracy.errors, "methods/group_revision"),
    ("grounding_transfer", grounding_transfer.claims, "methods/group_revision"),
    ("from_nothing", lambda found: from_nothing.claims(found)[:1], "../README"),
    ("from_nothing", lambda found: from_nothing.claims(found)[1:], "recipes"),
    ("demo", demo.gap_claims, "results"),
    ("demo", demo.share_claims, "results"),
    ("demo", demo.advice_claims, "advice"),
    ("allocation_pretrained", allocation_pretrained.claims, "results"),
    ("reasoning-short", recipe_claims.short_rollouts, "results"),
    ("reasoning-smollm2", demo.pretrained_claims, "results"),
    ("reasoning-smollm2", lambda found: demo.pretrained_claims(found)[:1], "../README"),
    ("sampling_batches", sampling_batches.claims, "allocation_tokens"),
    ("scaling_sampling", scaling_sampling.claims, "scale"),
    ("scale", lambda found: scale_tables.claims(found["worked_out"]), "scale"),
    ("scale", lambda found: scale_tables.trained_claims(found["savings"]), "scale"),
    (
        "offpolicy_stability",
        lambda found: offpolicy_report.claims(found["runs"]),
        "offpolicy_stability",
    ),
    (
        "offpolicy_long",
        lambda found: offpolicy_report.long_claims(found["runs"]),
        "offpolicy_stability",
    ),
    ("allocation_tokens", allocation_tokens.claims, "allocation_tokens"),
    ("allocation_batches", allocation_batches.claims, "allocation_tokens"),
    ("allocation_repeat", allocation_repeat.claims, "allocation_tokens"),
    ("allocation_sgpo", allocation_sgpo.claims, "allocation_tokens"),
    ("allocation_sgpo", lambda found: allocation_sgpo.claims(found)[:1], "methods/sgpo"),
    ("glyphs", recipe_claims.glyphs, "denoising"),
    ("clips", recipe_claims.clips, "denoising"),
    ("clips", lambda found: recipe_claims.clips(found)[-1:], "methods/flash_grpo"),
    ("stale_updates", recipe_claims.stale_updates, "results"),
    (
        "allocation_denoising",
        lambda found: allocation_denoising.claims(found["runs"]),
        "denoising",
    ),
    ("allocation_chunks", allocation_chunks.claims, "action-chunks"),
    ("allocation_chunks", allocation_chunks.advantage_claims, "methods/steps_by_advantage"),
    ("chunk_costs", chunk_costs.claims, "action-chunks"),
    ("manipulation-pixels", lambda found: recipe_claims.durations(found)[:1], "action-chunks"),
    ("translation", recipe_claims.translation, "own-model"),
    ("memory", memory.claims, "memory"),
    ("memory", memory.change_claims, "../CHANGELOG"),
    ("peer_trl", peer_trl.claims, "speed"),
    ("peer_trl", lambda found: peer_trl.claims(found)[:1], "../README"),
    ("peer_trl_tuning", tune.claims, "speed"),
    ("staleness", staleness.claims, "iterations"),
    ("peer_trl_run/0.2M", peer_trl_run.claims, "speed"),
    (
        "peer_trl_run/0.2M",
        lambda found: peer_trl_run.allocated_claims(found, DEFAULT)[:1],
        "../README",
    ),
    ("peer_trl_run/0.2M", peer_trl_run.first_claims, "../README"),
    ("peer_trl_run/10.4M-half", peer_trl_run.first_claims, "../README"),
    ("peer_trl_run/10.4M", peer_trl_run.steps_claims, "speed"),
    ("peer_trl_run/10.4M-half", peer_trl_run.half_claims, "speed"),
    ("peer_trl_run/*", lambda found: peer_trl_run.memory_claims(found)[:1], "../README"),
    ("peer_trl_run/*", lambda found: peer_trl_run.memory_claims(found)[1:], "speed"),
    ("peer_trl_run/*", peer_trl_run.revision_claims, "speed"),
    ("peer_trl_run/*", peer_trl_run.width_claims, "../README"),
    ("peer_trl_run_replay", replay.claims, "speed"),
    ("translation_methods", translation.claims, "translation"),
    ("translation_dates", translation_dates.claims, "translation"),
    ("grounding", recipe_claims.durations, "own-model"),
    ("translation", recipe_claims.seconds_of_seeds, "recipes"),
    ("grounding", recipe_claims.seconds_of_seeds, "recipes"),
]


def main() -> None:
    """Replaces the tables of all pages and prints the pages that changed."""
    for page in dict.fromkeys(page for _, _, page in TABLES):
        path = DOCS / f"{page}.md"
        before = path.read_text()
        made = [make(results_of(name)) for name, make, of in TABLES if of == page]
        after = replace_tables(before, made)
        if after != before:
            write_bytes(path, after.encode())
            print(path.relative_to(ROOT))


def results_of(name: str) -> dict[str, Any]:
    """Returns the committed results of a benchmark.

    Args:
      name: Of the file. Or of a folder and `/*`: its files, by name.
    """
    if name.endswith("/*"):
        of_folder = read_folder(RESULTS / name.removesuffix("/*"))
        if not of_folder:
            raise FileNotFoundError(f"{RESULTS / name} has no results; measure them first")
        return of_folder
    found: dict[str, Any] = read_json(RESULTS / f"{name}.json")
    return found


def replace_tables(page: str, tables: list[str]) -> str:
    """Returns the page with each table in the place of the next one that has its titles.

    Raises:
      ValueError: If the page has no such table.
    """
    blocks, next_with = page.split("\n\n"), dict[str, int]()
    for table in tables:
        titles = table.split("\n")[0]
        start = next_with.get(titles, 0)
        found = [
            at for at, each in enumerate(blocks[start:], start) if each.split("\n")[0] == titles
        ]
        if not found:
            raise ValueError(f"no table on the page has the titles {titles}")
        end = "\n" if blocks[found[0]].endswith("\n") else ""  # of the page
        blocks[found[0]], next_with[titles] = table.strip("\n") + end, found[0] + 1
    return "\n\n".join(blocks)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__).parse_args()
    main()
