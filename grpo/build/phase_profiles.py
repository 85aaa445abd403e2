"""What the profile measures of the phases of a robot's task."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from grpo.build.machine import prepare_machine
from grpo.build.policies.draws import draws_of_profile
from grpo.build.policies.loading import load_policy
from grpo.params.parameters import Parameters
from grpo.params.policy import ActionChunkPolicyParams
from grpo.policies.base import make_rollouts
from grpo.sampling import SampledBatch
from grpo.seeds import derive_seed
from grpo.types import Cost


def profile_steps(
    params: Parameters, directory: Path, batch: SampledBatch, rewards: pd.DataFrame
) -> tuple[dict[str, object], Cost]:
    """Returns where along the profile's rollouts the signal is, and what it cost to measure.

    Nothing if steps have no phases.

    Args:
      directory: The base policy's.
      rewards: Schema REWARDS, of the same rollouts.
    """
    if not isinstance(params.policy, ActionChunkPolicyParams):
        return {}, Cost()
    # Imported here: its statistics take a second that other policies need not wait.
    from grpo.phase_metrics import profile_phases
    from grpo.policies.phases import PHASE_NAMES

    prepare_machine(params.machine)
    draws = draws_of_profile(params)
    policy = load_policy(params, base=directory, directory=directory, draws=draws)
    group = torch.tensor(batch.table["group"].to_numpy())
    trajectory, logp = policy.unpack(batch.tensors, group)
    judged = rewards.set_index("rollout_id").loc[batch.table["rollout_id"]]
    outcome = torch.tensor(judged["outcome"].to_numpy(np.float32))
    rollouts = make_rollouts(trajectory, logp, group=group, reward=outcome, outcome=outcome)
    generator = torch.Generator().manual_seed(derive_seed(params.seed, "profile phases"))
    names = PHASE_NAMES[params.policy.phases]
    before = policy.cost
    found = profile_phases(policy, trajectory, rollouts, names, generator)
    return found, policy.cost - before
