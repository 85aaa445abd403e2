"""How policies draw, from parameters: for a round, for the profile, for evaluation."""

from dataclasses import replace

from grpo.params import Parameters
from grpo.policies.kernels import Denoising
from grpo.policies.tokens import Decoding
from grpo.policy_params import DenoisingDraws, TokenDraws, TokenSampling

Draws = Decoding | Denoising


def draws_of_arm(params: Parameters, arm: str) -> Draws:
    """Returns how an arm draws its rollouts, and scores them."""
    sampling = params.find_arm(arm).sampling
    if isinstance(sampling, TokenSampling):
        return replace(_decoding(params, sampling.temperature), routing=params.tokens.routing)
    return Denoising(
        num_steps=sampling.num_steps,
        density=sampling.density,
        noise_level=sampling.noise_level,
        stochastic=sampling.stochastic,
        window=sampling.window,
        guidance=sampling.guidance,
    )


def draws_of_profile(params: Parameters) -> Draws:
    """Returns how the profile draws: as evaluation does, several rollouts per prompt."""
    draws = draws_of_evaluation(params)["sampled"]
    if isinstance(draws, Decoding):
        return replace(draws, routing=params.tokens.routing)
    return draws


def draws_of_evaluation(params: Parameters) -> dict[str, Draws]:
    """Returns how evaluation draws: greedily, where there is such a thing, and at random."""
    sampling = params.evaluation.sampling
    if isinstance(sampling, TokenDraws):
        return {
            "greedy": _decoding(params, 0.0),
            "sampled": _decoding(params, sampling.temperature),
        }
    return {"sampled": _exact(sampling)}


def _exact(sampling: DenoisingDraws) -> Denoising:
    """Returns denoising without noise in its steps: only the start is drawn."""
    return Denoising(
        num_steps=sampling.num_steps,
        density="flow_sde",
        noise_level=1.0,
        stochastic="none",
        window=(0, sampling.num_steps),
        guidance=sampling.guidance,
    )


def _decoding(params: Parameters, temperature: float) -> Decoding:
    return Decoding(temperature=temperature, max_steps=params.tokens.max_steps)
