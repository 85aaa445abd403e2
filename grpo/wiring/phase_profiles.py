"""What the profile measures of the phases of steps."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from grpo.modalities.base import make_rollouts
from grpo.params.parameters import Parameters
from grpo.runtime.machine import prepare_machine
from grpo.runtime.seeds import derive_seed
from grpo.sampling.rollouts import SampledBatch
from grpo.types import Cost
from grpo.wiring.policies import draws_of_profile, load_policy


def profile_steps(
    params: Parameters, directory: Path, batch: SampledBatch, rewards: pd.DataFrame
) -> tuple[dict[str, object], Cost]:
    """Returns where along the profile's rollouts the signal is, and what it cost to measure.

    Nothing if steps have no phases.

    Args:
      directory: The base policy's.
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
