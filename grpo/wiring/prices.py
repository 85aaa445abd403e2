"""What groups of an arm cost, for a budget: by a cost model or by declared seconds."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from grpo.allocation.posterior import Floats
from grpo.allocation.selection import Seconds
from grpo.allocation.signal import Price, Rates
from grpo.errors import ParameterError
from grpo.modalities import all_modalities
from grpo.modalities.costs import CostModel
from grpo.modalities.modality import Modality
from grpo.params.parameters import Parameters
from grpo.runtime.artifacts.files import require_inert
from grpo.runtime.machine import prepare_machine
from grpo.schema import PARAMS
from grpo.wiring.allocation import build_selection

if TYPE_CHECKING:
    from grpo.modalities.policy import Policy


def build_price(
    params: Parameters,
    arm: str,
    *,
    base: Path,
    candidates: pd.DataFrame,
    training: Callable[[], Mapping[str, Any]],
    policy: "Policy[Any] | None" = None,
) -> Price | None:
    """Returns what groups of an arm cost; None if its selection reads no costs.

    Padding and audits are not counted.

    Args:
      base: The base policy's directory.
      candidates: Columns prompt_id and prompt.
      training: Returns those of `training_costs`; called only if costs are read.
      policy: A policy of the arm, for a budget of FLOPs; None: the base is loaded for it.

    Raises:
      ArtifactError: If the base policy is missing or broken, or may run code.
    """
    settings = params.find_arm(arm)
    seconds = build_selection(settings.selection, arm).seconds
    if seconds is None:
        return None
    costs = training()
    if any(seconds):
        rates = partial(_in_seconds, seconds, passes=costs["passes"])
    else:
        model = load_cost_model(params, base, policy)
        counts = model.count_tokens(candidates["prompt"].tolist())
        rates = partial(
            _in_flops,
            model,
            pd.Series(counts, index=candidates["prompt_id"]),
            passes=costs["passes"],
            scored=scores_proximal(costs["optimizer_steps_per_iteration"], model)
            + costs["penalizes_loss"],
            scored_before_credit=int(costs["penalizes_reward"]),
        )
    return Price(
        rates=rates,
        longest=float(params.modality.step_limit(params.policy, settings.sampling)),
        keep=costs["keep"],
        drops_uniform=costs["drops_uniform"],
    )


def _in_seconds(seconds: Seconds, ids: list[str], steps: Floats, *, passes: int) -> Rates:
    """Returns the declared seconds of rollouts with these mean steps."""
    return Rates(
        read=np.zeros(len(ids)),
        sampled=seconds.per_sampled_step * steps + seconds.per_judgement,
        trained=passes * seconds.per_trained_step * steps,
    )


def _in_flops(
    model: CostModel,
    tokens: "pd.Series[int]",
    ids: list[str],
    steps: Floats,
    *,
    passes: int,
    scored: int,
    scored_before_credit: int,
) -> Rates:
    """Returns the FLOPs of rollouts with these mean steps; a group reads its prompt once.

    Args:
      tokens: By prompt.
      passes: Over a trained rollout, each with a gradient.
      scored: Passes over a trained rollout for log-probs, beside these.
      scored_before_credit: The same over every sampled rollout.
    """
    lengths = tokens[ids].to_numpy()

    def sampling(size: int) -> Floats:
        flops: Floats = model.group_flops(
            lengths.astype(np.float64),
            np.full(len(ids), size),
            mean_later_steps=np.maximum(steps - 1, 0.0),
            mean_step_pairs=np.maximum(steps * (steps - 1) / 2, 0.0),
        )
        return flops

    whole = np.maximum(np.rint(steps), 1).astype(np.int64)
    training = model.rollout_flops(lengths, whole, is_training=True)
    scoring = model.rollout_flops(lengths, whole, is_training=False)
    return Rates(
        read=sampling(0),
        sampled=sampling(1) - sampling(0) + scored_before_credit * scoring,
        trained=passes * training + scored * scoring,
    )


def scores_proximal(optimizer_steps_per_iteration: int, model: CostModel) -> bool:
    """Returns whether an iteration needs a pass for the log-probs of its proximal policy.

    A single update is its own proximal policy, unless its routing is replayed.
    """
    return optimizer_steps_per_iteration > 1 or model.always_scores_proximal


def load_cost_model(
    params: Parameters, base: Path, policy: "Policy[Any] | None" = None
) -> CostModel:
    """Returns the cost model of a policy; without one, loads the base on the CPU.

    Raises:
      ArtifactError: If a file of the base policy is missing or broken, or may run code.
      ParameterError: If the modality has no cost model.
    """
    if not has_cost_model(params.modality):
        predicted = [kind for kind, each in all_modalities().items() if has_cost_model(each)]
        raise ParameterError(
            f"{PARAMS}: policy.kind must be {' or '.join(predicted)} for cost predictions, "
            f"got {params.policy.kind!r}"
        )
    if policy is None:
        # On the CPU: FLOPs do not depend on the device, and the machine may lack a GPU.
        machine = params.machine.model_copy(update={"device": "cpu", "compile": False})
        params = params.model_copy(update={"machine": machine})
        prepare_machine(machine)
        require_inert(base)
    model = params.modality.load_cost_model(params, base=base, policy=policy)
    assert model is not None
    return model


def has_cost_model(modality: Modality[Any, Any, Any]) -> bool:
    """Returns whether FLOPs of a modality can be predicted."""
    return type(modality).load_cost_model is not Modality.load_cost_model
