"""Dry runs of sampling and updates, which count their memory: no weights are read or made."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo.modalities.policy import Policy, make_rollouts
from grpo.modalities.shared.directories import trainable
from grpo.modalities.shared.flops import uncounted
from grpo.modalities.shared.optimizer import PreciseAdamW, optimized_tensors
from grpo.modalities.shared.recomputation import find_blocks, recomputed_blocks
from grpo.modalities.shared.states import gathered_bytes, state_bytes
from grpo.objective.base import Objective
from grpo.objective.penalty import needs_divergence, needs_reference
from grpo.params.parameters import Parameters
from grpo.runtime.dry_run import DryRun
from grpo.schema import DATA
from grpo.tasks.base import TaskInputs
from grpo.training.batches import Batch
from grpo.training.frozen import compute_log_probs
from grpo.training.updates import Loss, add_gradient
from grpo.types import Credit
from grpo.wiring.objectives import build_objective
from grpo.wiring.policies import draws_of_arm, make_optimizer
from grpo.wiring.tasks import make_tables

TRIED_PROMPTS = 16  # of the task; prompts are taken to be as long as the longest


@dataclass(kw_only=True)
class UpdateMemory:
    """The memory of updates of a policy, beside weights and the optimizer's states."""

    policy: Policy[Any]
    objective: Objective
    run: DryRun
    prompts: list[str]
    _known: dict[tuple[int, bool], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        one = self._longest(1)
        self.steps = int(one.mask.sum())  # of the longest rollout
        self.tokens = int(self.policy.widths(one, torch.tensor([0]), one.mask)[0])

    def rows(self, tokens_per_microbatch: int) -> int:
        """Returns the longest rollouts of a microbatch; one that exceeds the budget is alone."""
        return max(1, tokens_per_microbatch // self.tokens)

    def peak(self, rows: int, *, recompute: bool) -> int:
        """Returns the largest bytes of a microbatch of the longest rollouts."""
        key = rows, recompute
        if key not in self._known:
            with uncounted(), recomputed_blocks(self.policy.model, recompute):
                self._known[key] = self._measure(rows)
        return self._known[key]

    def largest_rows(self, room: float, *, recompute: bool) -> int:
        """Returns the largest number of rollouts whose peak is at most `room`, or 0."""

        def fits(rows: int) -> bool:
            return self.peak(rows, recompute=recompute) <= room

        if not fits(1):
            return 0
        low, high = 1, 2
        while fits(high):  # about proportional, so that the next guess is close
            low = high
            high = max(high + 1, int(high * room / self.peak(high, recompute=recompute)))
        while high - low > 1:
            share = room / self.peak(low, recompute=recompute)
            middle = min(max(int(low * share), low + 1), high - 1)
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _longest(self, rows: int) -> Any:
        with self.run:
            return self.policy.longest_rollouts(self.prompts, rollouts=rows)

    def _measure(self, rows: int) -> int:
        trajectory, budget = self._longest(rows), rows * self.tokens
        before = self.run.live_bytes

        def update() -> None:
            loss, batch = make_update(self.policy, self.objective, trajectory, budget)
            add_gradient(loss, batch, batch.credit)

        return self.run.peak_of(update) - before


def make_update(
    policy: Policy[Any], objective: Objective, trajectory: Any, tokens_per_microbatch: int
) -> tuple[Loss, Batch]:
    """Returns the inputs of an update on rollouts whose steps have all the same weight."""
    needed = trajectory.mask.float()
    reference = None
    if needs_reference(objective):
        reference = compute_log_probs(
            policy,
            trajectory,
            needed,
            tokens_per_microbatch,
            keeps_means=needs_divergence(objective),
        )
    rollouts = make_rollouts(
        trajectory,
        torch.zeros(needed.shape),
        group=trajectory.group,
        reward=torch.zeros(len(needed)),
        outcome=torch.zeros(len(needed)),
    )
    loss = Loss(
        policy=policy,
        objective=objective,
        trajectory=policy.replayed(trajectory),
        proximal=None,
        reference=reference,
        tokens_per_microbatch=tokens_per_microbatch,
    )
    credit = Credit(advantage=torch.ones(needed.shape), weight=needed)
    return loss, Batch(rows=torch.arange(len(needed)), rollouts=rollouts, credit=credit)


class PolicyMemory:
    """Dry runs of the policy that parameters describe.

    Raises:
      ParameterError: If a configuration or a prompt is not on this machine.
    """

    def __init__(self, params: Parameters, data: Path = DATA) -> None:
        self.params = params
        plain = params.policy.model_copy(update={"recompute": False})
        self._prompts = params.modality.rehearsed_prompts(params) or draw_prompts(params, data)
        self.run = DryRun()
        with uncounted():
            self.policy = params.modality.load_unfilled(
                params.model_copy(update={"policy": plain}),
                data=data,
                draws=draws_of_arm(params, next(iter(params.arms))),
                run=self.run,
            )
        self.weights = self.run.live_bytes
        self._optimizer: PreciseAdamW | None = None  # with gradients and moments

    def sampling(self, draws: Any, *, rollouts: int, group_size: int) -> dict[str, int]:
        """Returns the largest bytes of the parts of sampling, without weights.

        Args:
          rollouts: Number that is sampled together, in groups.
        """
        assert self.policy is not None
        self.policy.decoding = draws
        size = min(group_size, rollouts)
        sizes = [size] * (rollouts // size)
        prompts = [self._prompts[index % len(self._prompts)] for index in range(len(sizes))]
        before = self.run.live_bytes
        with uncounted():
            peaks = self.policy.sampling_peaks(self.run, prompts, group_sizes=sizes)
        return {part: peak - before for part, peak in peaks.items()}

    def states(self, ranks: int) -> dict[str, float]:
        """Returns the bytes of weights and the optimizer's states that a rank keeps."""
        assert self.policy is not None
        model = self.policy.model
        trained = sum(each.numel() for each in trainable(model).values())
        itemsize = next(model.parameters()).itemsize
        found = state_bytes(trained, itemsize=itemsize, ranks=ranks)
        return {**found, "weights": self.weights / ranks}

    def logits(self, steps: int) -> int:
        """Returns the largest bytes of the logits of a microbatch with some steps."""
        assert self.policy is not None
        return self.policy.logits_bytes(steps)

    def gathered(self) -> dict[str, float]:
        """Returns the bytes of complete weights and gradients during a pass of several ranks."""
        assert self.policy is not None
        model = self.policy.model
        blocks = [sum(p.numel() for p in each.parameters()) for each in find_blocks(model)]
        root = sum(each.numel() for each in model.parameters()) - sum(blocks)
        return gathered_bytes(max(blocks), root, itemsize=next(model.parameters()).itemsize)

    def updates(self, arm: str) -> UpdateMemory:
        """Returns the dry runs of an arm's updates, with gradients of an earlier microbatch."""
        assert self.policy is not None
        settings = self.params.find_arm(arm)
        if self._optimizer is None:
            with self.run:
                self._optimizer = make_optimizer(self.policy.model, settings.training)
                for each in optimized_tensors(self._optimizer):
                    each.grad = torch.zeros_like(each)
                self._optimizer.step()
        self.policy.decoding = draws_of_arm(self.params, arm)
        return UpdateMemory(
            policy=self.policy,
            objective=build_objective(settings.objective, arm),
            run=self.run,
            prompts=self._prompts,
        )


def draw_prompts(params: Parameters, data: Path) -> list[str]:
    """Returns prompts of the task, of a table that is no larger than needed if it makes them."""
    fields = type(params.task).model_fields
    few: dict[str, Any] = {
        name: min(
            getattr(params.task, name),
            max(TRIED_PROMPTS, len(getattr(params.task, "families", ()))),
        )
        for name in ("train_prompts", "eval_prompts")
        if name in fields
    }
    inputs = TaskInputs(
        seed=params.seed,
        data=data,
        warmup=None,
        takes_messages=params.modality.takes_messages(params.policy),
    )
    table = make_tables(params.task.model_copy(update=few), inputs).train
    prompts: list[str] = table["prompt"].tolist()
    return sorted(prompts, key=len, reverse=True)[:TRIED_PROMPTS]
