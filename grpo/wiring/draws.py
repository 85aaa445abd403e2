"""How policies draw, from parameters: for a round, for the profile, for evaluation."""

from dataclasses import replace

from grpo.modalities.action_chunks.decoding import ChunkDecoding
from grpo.modalities.denoising.sde_steps import Denoising
from grpo.modalities.tokens.policy import Decoding
from grpo.params.parameters import BASE, Parameters
from grpo.params.policy import (
    ActionChunkPolicyParams,
    DenoisingDraws,
    TokenDraws,
    TokenSampling,
)

Draws = Decoding | Denoising | ChunkDecoding


def draws_of(params: Parameters, asked_by: str) -> dict[str, Draws]:
    """Returns the ways of drawing that a section of the parameters asks for, by name.

    Args:
      asked_by: "profile", "evaluation" or "rounds.NAME".
    """
    if asked_by == "evaluation":
        return draws_of_evaluation(params)
    if asked_by == "profile":
        return {"sampled": draws_of_profile(params)}
    return {"sampled": draws_of_round(params, asked_by.removeprefix("rounds."))}


def draws_of_round(params: Parameters, name: str) -> Draws:
    """Returns how a round draws its rollouts, and scores them."""
    arm = params.find_round(name).arm
    draws, sampling = draws_of_arm(params, arm), params.find_arm(arm).sampling
    if not isinstance(draws, Denoising) or isinstance(sampling, TokenSampling):
        return draws
    first, end = sampling.window
    end = min(end, sampling.num_steps - 1)
    positions = sampling.num_steps - (end - first)
    behind = _rounds_behind(params, name)
    # From the last position it starts over.
    first, end = ((each + sampling.window_stride * behind) for each in (first, end))
    width, first = end - first, first % positions
    return replace(draws, window=(first, first + width))


def draws_of_arm(params: Parameters, arm: str) -> Draws:
    """Returns how an arm draws the rollouts of its first round."""
    sampling = params.find_arm(arm).sampling
    if isinstance(sampling, TokenSampling):
        return _with_routing(params, _decoding(params, sampling.temperature))
    return Denoising(
        num_steps=sampling.num_steps,
        density=sampling.density,
        noise_level=sampling.noise_level,
        stochastic=sampling.stochastic,
        window=sampling.window,
        guidance=sampling.guidance,
        scope=sampling.scope,
        variants=sampling.variants,
    )


def draws_of_profile(params: Parameters) -> Draws:
    """Returns how the profile draws: as evaluation does, several rollouts per prompt."""
    return _with_routing(params, draws_of_evaluation(params)["sampled"])


def draws_of_evaluation(params: Parameters) -> dict[str, Draws]:
    """Returns how evaluation draws: greedily, where there is such a thing, and at random."""
    sampling = params.evaluation.sampling
    if isinstance(sampling, TokenDraws):
        return {
            "greedy": _decoding(params, 0.0),
            "sampled": _decoding(params, sampling.temperature),
        }
    return {"sampled": _exact(sampling)}


def _rounds_behind(params: Parameters, name: str) -> int:
    """Returns how many rounds of the same arm a round goes on from."""
    arm, behind = params.rounds[name].arm, 0
    while (name := params.rounds[name].start) != BASE and params.rounds[name].arm == arm:
        behind += 1
    return behind


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


def _decoding(params: Parameters, temperature: float) -> Decoding | ChunkDecoding:
    if isinstance(params.policy, ActionChunkPolicyParams):
        return ChunkDecoding(temperature=temperature, max_steps=params.policy.max_steps)
    return Decoding(temperature=temperature, max_steps=params.tokens.max_steps)


def _with_routing(params: Parameters, draws: Draws) -> Draws:
    """Returns draws that record the routing that updates are to repeat."""
    if isinstance(draws, Decoding):
        return replace(draws, routing=params.tokens.routing)
    return draws
