"""Draws from a policy of the registry or of a round, as its evaluation did."""

import tempfile
from pathlib import Path

import pandas as pd

from grpo.build.machine import prepare_machine
from grpo.build.policies.draws import draws_of_evaluation
from grpo.build.policies.loading import load_sampler
from grpo.errors import ArtifactError, ParameterError
from grpo.params.parameters import BASE, PARAMS, read_params
from grpo.registry.weights import BASE_POLICY, POLICY
from grpo.sampling import SampledBatch, drawn_from, sample_rollouts


def draw_from(directory: Path, prompts: list[str], *, rollouts: int, seed: int) -> SampledBatch:
    """Returns rollouts of some prompts; the same for the same seed.

    Args:
      directory: As `load_version` writes it, or a policy of a pipeline, beside its base. Then the
        parameters are those of the working directory.
      rollouts: Of each prompt.

    Raises:
      ParameterError: If `rollouts` is not positive, or the directory's parameters are missing or
        wrong.
      ArtifactError: If a file of the policy is.
    """
    if rollouts < 1:
        raise ParameterError(f"--rollouts: must be >= 1, got {rollouts}")
    if not directory.is_dir():
        raise ArtifactError(
            f"{directory}: no such directory; name one that grpo load wrote, or a round's policy, "
            "as artifacts/policies/ROUND"
        )
    if (directory / POLICY).is_dir():
        params_file, base, own = directory / PARAMS, directory / BASE_POLICY, directory / POLICY
    else:
        params_file, base, own = PARAMS, directory.resolve().parent / BASE, directory
    params = read_params(params_file)
    prepare_machine(params.machine)
    policy = load_sampler(
        params,
        base=base,
        directory=own,
        draws=draws_of_evaluation(params)["sampled"],
    )
    table = pd.DataFrame(
        {"prompt_id": map(str, range(len(prompts))), "prompt": prompts, "rollouts": rollouts}
    )
    with tempfile.TemporaryDirectory() as scratch:
        return sample_rollouts(
            drawn_from(policy, directory / POLICY),
            table,
            rollouts_per_batch=params.evaluation.rollouts_per_batch,
            seed=seed,
            scratch=Path(scratch),
        )
