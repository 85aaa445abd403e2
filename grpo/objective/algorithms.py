"""Published algorithms as chains of links with the defaults of their papers.

[GRPO] arXiv 2402.03300; [Dr. GRPO] 2503.20783; [DAPO] 2503.14476; [RLOO] 2402.14740;
[GSPO] 2507.18071; [2-GRPO] 2510.00977; [CISPO] 2506.13585; [SAPO] 2511.20347;
[GMPO] 2507.20673; [LUSPO] 2602.05261; [Flow-GRPO] 2505.05470; [Flash-GRPO] 2605.15980;
[AWM] 2509.25050; [DiffusionNFT] 2509.16117; [PCM] 2605.16154; [Group Revision] 2605.15951;
[Garcia-Estrada] 2605.15976.
"""

from grpo.objective.advantage import (
    add_improvement,
    center_by_group_mean,
    leave_one_out,
    scale_by_group_std,
    scale_by_improvement,
)
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
    take_ratio_to_reference,
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

    Unlike the paper (beta 0.04): beta is 0 by default, as in TRL and verl, so that no reference
    policy is needed.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        clip_surrogate(low, high),
        penalize_kl(beta, "k3"),
    )


def dr_grpo(horizon: int, low: float = 0.2, high: float = 0.2) -> Objective:
    """Mean-centered rewards, normalized by a constant horizon. [Dr. GRPO, section 3.2]

    Args:
      horizon: Largest possible number of steps of a rollout: `policy.max_steps`, TRL's
        `max_completion_length`. It has no default: it cannot be derived from a batch.
    """
    return chain(center_by_group_mean(), average_over_horizon(horizon), clip_surrogate(low, high))


def dapo(low: float = 0.2, high: float = 0.28) -> Objective:
    """Group z-score, token mean, clip-higher, no uniform groups. [DAPO, eq. 8]

    Unlike the paper: uniform groups are dropped, not resampled.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_steps(),
        drop_uniform_groups(),
        clip_surrogate(low, high),
    )


def rloo(low: float = 0.2, high: float = 0.2) -> Objective:
    """Leave-one-out baseline, equal weight of prompts, any group sizes. [RLOO, eq. 8]

    Unlike the paper (one update per batch, no ratio): a clipped ratio, to allow several updates.
    """
    return chain(
        leave_one_out(), average_over_prompts(), drop_uniform_groups(), clip_surrogate(low, high)
    )


def gspo(low: float = 3e-4, high: float = 4e-4) -> Objective:
    """A length-normalized ratio of the whole rollout, clipped once per rollout. [GSPO, eq. 5]"""
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        average_ratio_over_rollout(),
        clip_surrogate(low, high),
    )


def gspo_token(low: float = 3e-4, high: float = 4e-4) -> Objective:
    """GSPO's ratio with token gradients, for advantages that differ by step. [GSPO, eq. 13]"""
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        average_ratio_keeping_token_gradient(),
        clip_surrogate(low, high),
    )


def translation_grpo(low: float = 0.2, high: float = 0.2, beta: float = 1e-3) -> Objective:
    """Group z-score, ratio of mean log-probs to the base policy, its own penalty. [Garcia-Estrada]

    As the code of the paper computes it. Rule U28 says what is wrong with its ratio; `gspo` is the
    same with a ratio to the policy before the iteration.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(epsilon=1e-4),
        average_over_rollouts(),
        take_ratio_to_reference(),
        average_ratio_over_rollout(),
        clip_surrogate(low, high),
        penalize_kl(beta, "k3_mirrored", over="rollout"),
    )


def two_grpo(low: float = 0.2, high: float = 0.28) -> Objective:
    """GRPO for groups of two with a binary outcome: A = (+1, -1) or (0, 0). [2-GRPO, eq. 6]"""
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        drop_uniform_groups(),
        clip_surrogate(low, high),
    )


def cispo(ratio_max: float = 5.0) -> Objective:
    """Group z-score, token mean, a truncated weight in place of a clip. [CISPO]

    The paper does not state its bound; the default is that of TRL's recipe of ScaleRL
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
    """GSPO with the loss summed over steps: a rollout's weight grows with its length. [LUSPO]"""
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        sum_over_steps(),
        average_ratio_over_rollout(),
        clip_surrogate(low, high),
    )


def flow_grpo(dimensions: int, low: float = 1e-4, high: float = 1e-4) -> Objective:
    """Group z-score on denoising steps, with a ratio per dimension. [Flow-GRPO]

    Unlike the paper: the std is that of the group, not of the batch; advantages are not clamped at
    5; no KL penalty.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        scale_log_ratio(dimensions),
        clip_surrogate(low, high),
    )


def flash_grpo(dimensions: int, low: float = 1e-3, high: float = 1e-3) -> Objective:
    """Flow-GRPO on one step per prompt, with weights rectified by noise level. [Flash-GRPO]

    The arm's sampling must set `stochastic: one_per_prompt`, which chooses the step.

    Unlike the paper's code: the std is that of the group, not of the batch; advantages are not
    clamped at 5.
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
    """GRPO on chunks of a robot's actions, with the log ratio averaged over action tokens. [PCM]

    Unlike the paper: one ratio per chunk, the geometric mean of its tokens' ratios, is clipped, in
    place of one ratio per token (clipped at 0.2 and 0.4); no entropy bonus.

    Args:
      tokens: Number of action tokens of a chunk.
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
    """`chunk_grpo` on `budget` chunks per rollout, sampled by phase contrast. [PCM, alg. 1]

    Unlike the paper: see `sample_chunks_by_phase` and `chunk_grpo`.
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


def group_revision(
    weight: float = 5.0, low: float = 0.2, high: float = 0.2, center: str = "none"
) -> Objective:
    """GRPO on revisions of a first answer; what they improve counts twice. [Group Revision]

    The arm's selection must hold `revise_first_answers`. The advantages do not sum to 0 over a
    group, and the improvement is in both the reward and the factor, as published (rule U17).
    `center: group` corrects the former; for neither, put `add_improvement` in front of `grpo`.
    """
    return chain(
        add_improvement(weight),
        center_by_group_mean(),
        scale_by_group_std(),
        scale_by_improvement(center),
        average_over_rollouts(),
        clip_surrogate(low, high),
    )


def diffusion_nft(dimensions: int, beta: float = 1.0, clip: float = 5.0) -> Objective:
    """Group z-score, contrast of an implicit positive and negative policy. [DiffusionNFT]

    The arm's sampling must set `density: matched`.

    Unlike the paper: see `contrast_implicit_policies`; the std is that of the group, not of the
    batch.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        scale_log_ratio(dimensions),
        contrast_implicit_policies(beta, clip),
    )


def awm(dimensions: int) -> Objective:
    """Group z-score times the flow-matching error of a sampled image, without a ratio. [AWM]

    The arm's sampling must set `density: matched`. The released code clips a ratio of the errors
    instead: for that, replace weigh_log_prob by clip_surrogate.

    Unlike the paper: steps of the schedule, equally weighted, in place of a distribution of times;
    no penalty towards the reference.
    """
    return chain(
        center_by_group_mean(),
        scale_by_group_std(),
        average_over_rollouts(),
        scale_log_ratio(dimensions),
        weigh_log_prob(),
    )
