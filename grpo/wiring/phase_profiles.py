"""Measurements of the profile by phase of steps."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from grpo.modalities.policy import make_rollouts
from grpo.params.parameters import Parameters
from grpo.runtime.machine import prepare_machine
from grpo.runtime.seeds import derive_seed
from grpo.sampling.rollouts import SampledBatch
from grpo.types import Cost
from grpo.wiring.policies import draws_of_profile, load_policy


def profile_steps(
    params: Parameters, directory: Path, batch: SampledBatch, rewards: pd.DataFrame
) -> tuple[dict[str, object], Cost]:
    """Returns the metrics by phase of the profile's rollouts, and the cost of measuring them.

    Empty if steps have no phases.

    Args:
      directory: Directory of the base policy.
      rewards: Schema REWARDS, of the same rollouts.
    """
    names = [each.name for each in params.modality.phases(params.policy)]
    if not names:
        return {}, Cost()
    prepare_machine(params.machine)
    draws = draws_of_profile(params)
    policy = load_policy(params, base=directory, directory=directory, draws=draws)
    group = torch.tensor(batch.table["group"].to_numpy())
    trajectory, logp = policy.unpack(batch.tensors, group)
    judged = rewards.set_index("rollout_id").loc[batch.table["rollout_id"]]
    outcome = torch.tensor(judged["outcome"].to_numpy(np.float32))
    rollouts = make_rollouts(trajectory, logp, group=group, reward=outcome, outcome=outcome)
    generator = torch.Generator().manual_seed(derive_seed(params.seed, "profile phases"))
    before = policy.cost
    found = params.modality.measure_phases(policy, trajectory, rollouts, names, generator)
    return found, policy.cost - before
