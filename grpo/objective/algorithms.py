"""The published algorithms, each a chain of links with its paper's defaults.

[GRPO] arXiv 2402.03300; [Dr. GRPO] 2503.20783; [DAPO] 2503.14476; [RLOO] 2402.14740;
[GSPO] 2507.18071; [2-GRPO] 2510.00977; [CISPO] 2506.13585; [SAPO] 2511.20347;
[GMPO] 2507.20673; [LUSPO] 2602.05261; [Flow-GRPO] 2505.05470; [Flash-GRPO] 2605.15980;
[AWM] 2509.25050; [DiffusionNFT] 2509.16117; [PCM] 2605.16154.
"""

from grpo.objective.advantage import center_by_group_mean, leave_one_out, scale_by_group_std
from grpo.objective.base import Objective, chain
from grpo.objective.chunks import sample_chunks_by_phase
from grpo.objective.penalty import penalize_kl
from grpo.objective.trust import (
    average_clipped_log_ratio,
    average_ratio_keeping_token_gradient,
    average_ratio_over_rollout,
    clip_surrogate,
    contrast_implicit_policies,
    gate_ratio_softly,
    scale_log_ratio,
    truncate_ratio,
    weigh_log_prob,
)
from grpo.objective.weight import (
    average_over_horizon,
    average_over_prompts,
    average_over_rollouts,
    average_over_steps,
    drop_uniform_groups,
    rectify_noise_level,
    sum_over_steps,
)


def grpo(low: float = 0.2, high: float = 0.2, beta: float = 0.0) -> Objective:
    """Group z-score, mean over rollouts, symmetric clip, k3 penalty. [GRPO, eq. 3]

    Unlike the paper, whose beta is 0.04: no penalty, and so no reference, unless it is asked for,
    as in TRL and verl.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        clip_surrogate(low, high),
        penalize_kl(beta, "k3"),
    )


def dr_grpo(horizon: int, low: float = 0.2, high: float = 0.2) -> Objective:
    """No deviation and no length in the normalizer: a constant horizon. [Dr. GRPO, section 3.2]

    Args:
      horizon: Steps of the longest rollout there can be: `policy.max_steps`, TRL's
        `max_completion_length`. It has no default: a batch does not say it.
    """
    return chain(center_by_group_mean(), average_over_horizon(horizon), clip_surrogate(low, high))


def dapo(low: float = 0.2, high: float = 0.28) -> Objective:
    """Group z-score, token mean, clip-higher, no uniform groups. [DAPO, eq. 8]

    Unlike the paper: uniform groups are dropped, not replaced by freshly sampled ones.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_steps(),
        drop_uniform_groups(),
        clip_surrogate(low, high),
    )


def rloo(low: float = 0.2, high: float = 0.2) -> Objective:
    """Leave-one-out baseline, every prompt the same weight: fits groups of any size. [RLOO, eq. 8]

    Unlike the paper (one update per batch, no ratio): a clipped ratio, for several updates.
    """
    return chain(
        leave_one_out(), average_over_prompts(), drop_uniform_groups(), clip_surrogate(low, high)
    )


def gspo(low: float = 3e-4, high: float = 4e-4) -> Objective:
    """The length-normalized ratio of the whole rollout, clipped as one. [GSPO, eq. 5]"""
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        average_ratio_over_rollout(),
        clip_surrogate(low, high),
    )


def gspo_token(low: float = 3e-4, high: float = 4e-4) -> Objective:
    """GSPO's ratio, a gradient per token: takes advantages that differ by step. [GSPO, eq. 13]"""
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        average_ratio_keeping_token_gradient(),
        clip_surrogate(low, high),
    )


def two_grpo(low: float = 0.2, high: float = 0.28) -> Objective:
    """GRPO for groups of two with a binary outcome: A = (+1, -1) or nothing. [2-GRPO, eq. 6]"""
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        drop_uniform_groups(),
        clip_surrogate(low, high),
    )


def cispo(ratio_max: float = 5.0) -> Objective:
    """Group z-score, token mean, a truncated weight in place of a clip. [CISPO]

    Unlike the paper, which does not print its bound: that of TRL's recipe of ScaleRL
    (arXiv 2510.13786).
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_steps(),
        truncate_ratio(ratio_max),
    )


def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05) -> Objective:
    """Group z-score, mean over rollouts, a soft gate in place of a clip. [SAPO]"""
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        gate_ratio_softly(tau_positive, tau_negative),
    )


def gmpo(low: float = 0.4, high: float = 0.4) -> Objective:
    """The geometric mean of a rollout's ratios, each clipped in log space. [GMPO]"""
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        average_clipped_log_ratio(low, high),
    )


def luspo(low: float = 2e-3, high: float = 2.5e-3) -> Objective:
    """GSPO times the rollout's length: steps add up, so long rollouts are not damped. [LUSPO]"""
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        sum_over_steps(),
        average_ratio_over_rollout(),
        clip_surrogate(low, high),
    )


def flow_grpo(dimensions: int, low: float = 1e-4, high: float = 1e-4) -> Objective:
    """Group z-score on denoising steps, their ratio per dimension. [Flow-GRPO]

    Unlike the paper: the deviation of the group, not of the batch; advantages are not clamped at 5;
    no KL penalty.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        scale_log_ratio(dimensions),
        clip_surrogate(low, high),
    )


def flash_grpo(dimensions: int, low: float = 1e-3, high: float = 1e-3) -> Objective:
    """Flow-GRPO on one step per prompt, rectified. [Flash-GRPO]

    The step is chosen by the arm's sampling: `stochastic: one_per_prompt`. Unlike its code: the
    deviation of the group, not of the batch; advantages are not clamped at 5.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        rectify_noise_level(),
        scale_log_ratio(dimensions),
        clip_surrogate(low, high),
    )


def chunk_grpo(tokens: int, low: float = 0.05, high: float = 0.1) -> Objective:
    """GRPO on chunks of a robot's actions, whose ratio is the mean over their action tokens. [PCM]

    Unlike the paper: the ratio is a chunk's geometric mean, clipped as one, in place of one ratio
    per token (clipped at 0.2 and 0.4); no entropy bonus.

    Args:
      tokens: Action tokens of a chunk.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        drop_uniform_groups(),
        scale_log_ratio(tokens),
        clip_surrogate(low, high),
    )


def pcm(
    *,
    tokens: int,
    budget: int,
    weights: str = "none",
    floor: float = 0.1,
    low: float = 0.05,
    high: float = 0.1,
) -> Objective:
    """`chunk_grpo` on a few chunks per rollout, of phases in which outcomes differ. [PCM, alg. 1]

    Deviations: see `sample_chunks_by_phase` and `chunk_grpo`.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        drop_uniform_groups(),
        sample_chunks_by_phase(budget, floor, weights=weights),
        scale_log_ratio(tokens),
        clip_surrogate(low, high),
    )


def diffusion_nft(dimensions: int, beta: float = 1.0, clip: float = 5.0) -> Objective:
    """Group z-score in place of a ratio: follow what was good, mirror what was not. [DiffusionNFT]

    The arm's sampling says `density: matched`. Deviations: see `contrast_implicit_policies`; the
    deviation is the group's, not the batch's.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        scale_log_ratio(dimensions),
        contrast_implicit_policies(beta, clip),
    )


def awm(dimensions: int) -> Objective:
    """Group z-score times the matching error of an image that was drawn: no ratio, no noise. [AWM]

    The arm's sampling says `density: matched`. Unlike the paper: steps of the schedule, equally
    weighted, in place of a distribution of times; no penalty towards the reference. Its released
    code clips a ratio of the errors instead: put clip_surrogate for weigh_log_prob.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        scale_log_ratio(dimensions),
        weigh_log_prob(),
    )
