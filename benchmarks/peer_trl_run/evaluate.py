"""Evaluates policies of either side with this project's sampler and judge; prints JSON.

python -m benchmarks.peer_trl_run.evaluate WORKSPACE POLICY...

A policy is a directory of `save_pretrained` (TRL) or of a round. All are evaluated on the prompts
of artifacts/prompts/eval.parquet, at the temperature and with the random numbers of the stage
`evaluate`'s parameters in params.yaml.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from grpo.modalities.tokens.policy import TokenPolicy
from grpo.params.parameters import Parameters, read_params
from grpo.runtime.artifacts.tables import PROMPTS, read_table
from grpo.runtime.machine import prepare_machine
from grpo.sampling.scoring import RewardRule, judge_rollouts
from grpo.schema import DATA
from grpo.wiring.policies import draws_of_evaluation, load_policy
from grpo.wiring.rewards import build_reward

WEIGHTS = "model.safetensors"


def main(workspace: Path, policies: list[Path]) -> None:
    """Prints mean@k and the mean number of steps of each policy, in order."""
    os.chdir(workspace)
    params = read_params()
    prepare_machine(params.machine)
    prompts = read_table(Path("artifacts/prompts/eval.parquet"), PROMPTS)
    base, draws = Path("artifacts/policies/base"), draws_of_evaluation(params)["sampled"]
    policy = load_policy(params, base=base, directory=base, draws=draws)
    assert isinstance(policy, TokenPolicy)
    rule = build_reward(params, DATA)
    for each in policies:
        put_weights(policy.model, each)
        print(json.dumps(mean_at_k(policy, prompts, rule, params)), flush=True)


def put_weights(model: torch.nn.Module, policy: Path) -> None:
    """Loads a policy's weights; those that are tied are stored once."""
    missing, unknown = model.load_state_dict(load_file(policy / WEIGHTS), strict=False)
    if unknown or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"{policy}: weights must fit the base: {missing=} {unknown=}")


def mean_at_k(
    policy: TokenPolicy, prompts: Any, rule: RewardRule, params: Parameters
) -> dict[str, float]:
    """Returns the mean outcome and the mean number of steps over all prompts."""
    k, batch = params.evaluation.rollouts_per_prompt, params.evaluation.rollouts_per_batch
    generator = torch.Generator().manual_seed(params.seed)
    outcomes, steps = list[float](), list[int]()
    for start in range(0, len(prompts), batch // k):
        part = prompts[start : start + batch // k]
        trajectory, _ = policy.sample(
            part["prompt"].tolist(), group_sizes=[k] * len(part), generator=generator
        )
        rollouts = part.iloc[trajectory.group.tolist()][["prompt_id"]].reset_index(drop=True)
        rollouts = rollouts.assign(
            rollout_id=rollouts.index.astype(str),
            text=policy.decode(trajectory),
            steps=trajectory.mask.sum(dim=1).tolist(),
            is_finished=policy.is_finished(trajectory).tolist(),
        )
        outcomes += judge_rollouts(rollouts, prompts, rule).rewards["outcome"].tolist()
        steps += rollouts["steps"].tolist()
    return {
        "reward": round(sum(outcomes) / len(outcomes), 5),
        "steps": round(sum(steps) / len(steps), 3),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(each).resolve() for each in sys.argv[2:]])
