"""A finished run small enough to compute its report by hand.

Two arms start from `base`; every round of `uniform` costs 60 + 40 FLOPs, every round of `sgpo`
30 + 20, and the profile 50. Four evaluation prompts, four rollouts each::

    policy     successes    mean   cumulative FLOPs
    base       0 0 2 2      0.25   0 (uniform), 50 (sgpo)
    uniform-1  1 1 3 3      0.5    100
    uniform-2  2 2 4 4      0.75   200
    sgpo-1     3 3 4 4      0.875  100
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from grpo.report.reading import Run
from grpo.runtime.artifacts.files import read_json, write_bytes, write_json
from grpo.runtime.artifacts.tables import (
    CREDIT,
    EVALUATION,
    EVALUATION_SAMPLES,
    PROFILE,
    PROMPTS,
    REWARDS,
    ROLLOUTS,
    write_table,
)

SUCCESSES = {
    "base": [0, 0, 2, 2],
    "uniform-1": [1, 1, 3, 3],
    "uniform-2": [2, 2, 4, 4],
    "sgpo-1": [3, 3, 4, 4],
}
FLOPS = {"uniform": (60, 40), "sgpo": (30, 20)}  # of sampling and updating, per round
PROFILE_FLOPS = 50
EVALUATION_FLOPS = 7
WARMUP_FLOPS = 1000
HOSTILE = "<script>alert('rollout')</script>\x1b[31m & <b>bold</b>"

ReadWith = Callable[..., Run]


def cost(flops: int) -> dict[str, int]:
    return {
        "flops": flops,
        "sampled_steps": 10 * flops,
        "trained_steps": 0,
        "judge_calls": flops // 10,
    }


def write_prompts(artifacts: Path) -> None:
    """Writes three training prompts, solved never, half the time and always, and the others."""
    names = ["never", "half", "always"]
    prompts = pd.DataFrame(
        {"prompt_id": names, "family": "f", "prompt": "trained", "answer": "2", "entry": "{}"}
    )
    write_table(prompts, artifacts / "prompts/train.parquet", PROMPTS)
    held_out = [f"e{i}" for i in range(len(SUCCESSES["base"]))]
    others = pd.DataFrame(
        {"prompt_id": held_out, "family": "f", "prompt": held_out, "answer": "2", "entry": "{}"}
    )
    write_table(others, artifacts / "prompts/eval.parquet", PROMPTS)
    profile = pd.DataFrame(
        {
            "prompt_id": names,
            "family": "f",
            "rollouts": 4,
            "successes": [0, 2, 4],
            "outcome_rate": [0.0, 0.5, 1.0],
            "mean_steps": 3.0,
            "solved_steps": [None, 3.0, 3.0],
        }
    )
    write_table(profile, artifacts / "profile/prompts.parquet", PROFILE)
    write_json(artifacts / "profile/summary.json", {"cost": cost(PROFILE_FLOPS), "rollouts": 12})


def write_evaluation(artifacts: Path, name: str, successes: list[int]) -> None:
    scores = [each / 8 for each in successes]
    table = pd.DataFrame(
        {
            "prompt_id": [f"e{i}" for i in range(len(successes))],
            "family": "f",
            "greedy": [float(each > 1) for each in successes],
            "rollouts": 4,
            "successes": successes,
            "first_text": [f"{name} #{1 + (each > 0)} {HOSTILE}" for each in successes],
            "first_outcome": [float(each > 0) for each in successes],
            **{f"greedy_score.{each}": scores for each in ("exact", "ocr")},
            **{f"score.{each}": scores for each in ("exact", "ocr")},
        }
    )
    write_table(table, artifacts / f"evaluations/{name}.parquet", EVALUATION)
    write_samples(artifacts, name, successes)
    mean = sum(successes) / (4 * len(successes))
    score = {"value": mean, "low": mean - 0.1, "high": mean + 0.1}
    # The recipe of images maximizes the score of its judge, which an evaluation then has.
    judged = [f"{kind}.{each}" for kind in ("score", "greedy_score") for each in ("exact", "ocr")]
    found = dict.fromkeys(("greedy", "mean_at_k", "pass_at_k", *judged), score)
    corpus = {"greedy": {"f": {"chrf": mean}}}
    summary = {"k": 4, **found, "by_family": {}, "corpus": corpus, "cost": cost(EVALUATION_FLOPS)}
    write_json(artifacts / f"evaluations/{name}.json", summary)


def write_samples(artifacts: Path, name: str, successes: list[int]) -> None:
    """Writes the first two rollouts of every prompt; the first so many successes are right."""
    rows = [
        {
            "rollout_id": f"e{i}/{member}",
            "prompt_id": f"e{i}",
            "family": "f",
            "prompt": f"{i}+1=",
            "text": f"{name} wrote {member} & {HOSTILE}",
            "image": b"",
            "outcome": float(member < count),
            "reward": float(member < count),
        }
        for i, count in enumerate(successes)
        for member in range(2)
    ]
    path = artifacts / f"evaluations/{name}.samples.parquet"
    write_table(pd.DataFrame(rows), path, EVALUATION_SAMPLES)


def write_round(artifacts: Path, name: str, *, sampling: int, update: int) -> None:
    """Writes two groups of two: `never` uniform and untrained, `half` with advantages +-0.5."""
    prompt = ["never", "never", "half", "half"]
    ids = [f"{each}/{i % 2}" for i, each in enumerate(prompt)]
    rollouts = pd.DataFrame(
        {
            "rollout_id": ids,
            "prompt_id": prompt,
            "group": [0, 0, 1, 1],
            "text": ["#", HOSTILE, "2", "3"],
            "steps": 3,
            "is_finished": [True, False, True, True],
        }
    )
    write_table(rollouts, artifacts / f"rollouts/{name}/table.parquet", ROLLOUTS)
    write_json(artifacts / f"rollouts/{name}/summary.json", {"cost": cost(sampling)})
    rewards = pd.DataFrame(
        {
            "rollout_id": ids,
            "prompt_id": prompt,
            "outcome": [0.0, 0.0, 1.0, 0.0],
            "reward": [0.0, 0.0, 1.0, 0.0],
            "status": ["scored", "unparsable", "scored", "scored"],
            "detail": "",
        }
    )
    write_table(rewards, artifacts / f"rewards/{name}.parquet", REWARDS)
    credit = pd.DataFrame(
        {
            "rollout_id": ids,
            "prompt_id": prompt,
            "update": 0,
            "advantage": [0.0, 0.0, 0.5, -0.5],
            "weight": [0.0, 0.0, 2.0, 3.0],
            "trained_steps": [0, 0, 3, 3],
        }
    )
    write_table(credit, artifacts / f"training/{name}/credit.parquet", CREDIT)
    summary = {"cost": cost(update), "audit_cost": cost(0)}
    write_json(artifacts / f"training/{name}/summary.json", summary)
    write_updates(artifacts, name, [""])
    columns = "step,rollouts,reward_std_within,trained_rollouts,advantage_mean,advantage_abs_mean"
    steps = f"{columns}\n0,4,0.25,2,0,0.5\n1,2,0.5,2,0,0.5\n2,1,,1,-0.5,0.5\n"
    write_bytes(artifacts / f"training/{name}/steps.csv", steps.encode())


def write_later_iteration(
    artifacts: Path, name: str, index: int, *, prompt_ids: Sequence[str] = ("half", "always")
) -> None:
    """Writes one more iteration of a round, which samples prompts in groups of 1 + `index`.

    The first rollout of each group is solved and has an advantage of 0.25. Sampling costs 3 FLOPs,
    which are part of those of training.
    """
    folder = artifacts / f"training/{name}/iteration-{index:04d}"
    size = 1 + index
    prompt = [each for each in prompt_ids for _ in range(size)]
    ids = [f"{each}/{number}" for each in prompt_ids for number in range(size)]
    solved = [float(number == 0) for _ in prompt_ids for number in range(size)]
    rollouts = pd.DataFrame({"rollout_id": ids, "prompt_id": prompt})
    group = [number for number in range(len(prompt_ids)) for _ in range(size)]
    drawn = rollouts.assign(group=group, text=f"drawn {index}", steps=2, is_finished=True)
    write_table(drawn, folder / "rollouts/table.parquet", ROLLOUTS)
    selection = {"skipped": 1, "sampled": 3, "reused": 0, "kept": 2, "oversampling_factor": 1.5}
    write_json(
        folder / "rollouts/summary.json",
        {"cost": cost(3), "rollouts": len(ids), "selection": selection},
    )
    judged = rollouts.assign(outcome=solved, reward=solved, status="scored", detail="")
    write_table(judged, folder / "rewards.parquet", REWARDS)
    used = {"advantage": [0.25 * each for each in solved], "weight": 1.0, "trained_steps": 2}
    write_table(rollouts.assign(update=index, **used), folder / "credit.parquet", CREDIT)
    columns = "step,rollouts,reward_std_within,trained_rollouts,advantage_mean,advantage_abs_mean"
    rows = f"0,{len(ids)},0.5,{len(ids)},0,0.5\n1,{index},1.0,1,0,0.5\n"
    write_bytes(folder / "steps.csv", f"{columns}\n{rows}".encode())
    path = artifacts / f"training/{name}/summary.json"
    summary = read_json(path)
    spent = Counter(summary["cost"]) + Counter(cost(3))
    later = Counter(summary.get("sampling_cost", {})) + Counter(cost(3))
    for key, amount in {"cost": spent, "sampling_cost": later}.items():
        summary[key] = {each: amount[each] for each in cost(0)}
    write_json(path, {**summary, "iterations": 1 + index})
    write_updates(artifacts, name, [""] * size)


def write_updates(artifacts: Path, name: str, audits: list[str]) -> None:
    """Writes updates.csv; `audits` are "cosine,norm_ratio" per update, or "" for none."""
    columns = "update,reward_mean,uniform_group_fraction,clip_fraction,kl_to_start"
    rows = [f"{i},1,0.5,0,0,{each or ','}" for i, each in enumerate(audits)]
    text = "\n".join([f"{columns},audit_cosine,audit_norm_ratio", *rows, ""])
    write_bytes(artifacts / f"training/{name}/updates.csv", text.encode())
