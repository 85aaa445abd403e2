"""Samples from a registered policy or a round's policy, with the settings of its evaluation."""

import tempfile
from pathlib import Path

import pandas as pd

from grpo.errors import ArtifactError, ParameterError, brief
from grpo.modalities.shared.directories import STATE
from grpo.params.parameters import BASE, Parameters, read_params
from grpo.registry.weights import BASE_POLICY, POLICY
from grpo.runtime.machine import prepare_machine
from grpo.sampling.drawing import local_executor, sample_rollouts
from grpo.sampling.rollouts import SampledBatch
from grpo.schema import PARAMS
from grpo.wiring.policies import draws_of_evaluation, load_sampler


def draw_from(directory: Path, prompts: list[str], *, rollouts: int, seed: int) -> SampledBatch:
    """Returns rollouts of the given prompts, deterministic in the seed.

    Args:
      directory: A directory written by `load_version`, or a policy of a pipeline, next to its
        base. A pipeline's policy uses the parameters of the working directory.
      rollouts: Number of rollouts per prompt.

    Raises:
      ParameterError: If `rollouts` is not positive, a prompt is not a text, or the directory's
        parameters are missing or wrong.
      ArtifactError: If the directory holds no policy, or a file of the policy is missing or
        wrong.
    """
    if rollouts < 1:
        raise ParameterError(f"--rollouts: must be >= 1, got {rollouts}")
    for prompt in prompts:
        _require_text(prompt)
    params, base, own = find_policy(directory)
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
            local_executor(policy, own),
            table,
            rollouts_per_batch=params.evaluation.rollouts_per_batch,
            seed=seed,
            scratch=Path(scratch),
        )


def find_policy(directory: Path) -> tuple[Parameters, Path, Path]:
    """Returns a policy's parameters, its base's directory and its own.

    Args:
      directory: As for `draw_from`.

    Raises:
      ArtifactError: If the directory holds no policy.
      ParameterError: If its parameters are missing or wrong.
    """
    is_loaded = (directory / POLICY).is_dir()
    if not is_loaded and not (directory / STATE).is_file():
        wrong = "holds no policy" if directory.is_dir() else "no such directory"
        raise ArtifactError(
            f"{directory}: {wrong}; name a directory that grpo load wrote, or a round's policy, as "
            "artifacts/policies/ROUND"
        )
    if is_loaded:
        return read_params(directory / PARAMS), directory / BASE_POLICY, directory / POLICY
    return read_params(PARAMS), directory.resolve().parent / BASE, directory


def _require_text(prompt: str) -> None:
    """Raises ParameterError if a prompt is empty or not Unicode."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ParameterError(
            f"PROMPT: must be Unicode, got {brief(ascii(prompt))}; write it in UTF-8"
        ) from None
    if not prompt.strip():
        raise ParameterError(f"PROMPT: must not be empty, got {prompt!r}; write a text")
