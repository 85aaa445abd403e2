"""An iteration that trains on its rollouts several times, as TRL with num_iterations."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from grpo.objective.advantage import center_by_group_mean
from grpo.objective.base import Objective, chain
from grpo.objective.trust import clip_surrogate
from grpo.objective.weight import average_over_steps
from grpo.params.parameters import Parameters, read_params
from grpo.runtime.artifacts.files import Scratch
from grpo.training.updates import Iteration, TrainedIteration, run_updates
from grpo.types import Cost
from grpo.wiring.checks import findings
from grpo.wiring.policies import make_optimizer
from grpo.wiring.prices import build_price
from grpo.wiring.training_costs import training_costs
from tests.modalities.tiny import seeded, tiny_policy
from tests.training.test_training import TRAINING, sampled_round, settings_of

ROOT = Path(__file__).parents[2]
LOW, HIGH, RATE = 0.2, 0.28, 0.02


def objective() -> Objective:
    return chain(center_by_group_mean(), average_over_steps(), clip_surrogate(LOW, HIGH))


def train(updates: int, passes: int) -> tuple[nn.Module, TrainedIteration, Cost]:
    """Returns the trained model, what the updates returned, and their cost."""
    policy, rollouts, trajectory = sampled_round()
    policy.cost = Cost()
    trained = run_updates(
        Iteration(
            policy=policy,
            optimizer=make_optimizer(
                policy.model, TRAINING.model_copy(update={"learning_rate": RATE})
            ),
            objective=objective(),
            objective_state=objective().init(),
            settings=replace(
                settings_of(10_000), updates_per_iteration=updates, passes_per_iteration=passes
            ),
            trajectory=trajectory,
            rollouts=rollouts,
            first_update=0,
            generator=seeded(),
        ),
        scratch=Scratch(f"passes-{updates}-{passes}", "a"),
        progress=lambda done, total: None,
    )
    return policy.model, trained, policy.cost


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("updates", "passes"), [(1, 3), (2, 2)])
def test_passes_are_ppo_epochs_in_plain_pytorch(updates: int, passes: int):
    """Every pass has the same batches, and ratios to the policy before the first of them."""
    model, trained, _ = train(updates, passes)
    policy, rollouts, trajectory = sampled_round()
    plain = policy.model
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=RATE, betas=TRAINING.betas, weight_decay=0.0
    )
    clipped = 0
    for _ in range(passes):
        for batch in trained.batches:
            reward, group = rollouts.reward[batch.rows], rollouts.group[batch.rows]
            mean = torch.stack([reward[group == each].mean() for each in group])
            mask = rollouts.mask[batch.rows]
            logp = policy.step_log_probs(trajectory.select(batch.rows, mask.shape[1]), mask).logp
            ratio = torch.exp(torch.where(mask, logp - rollouts.behavior_logp[batch.rows], 0.0))
            advantage = (reward - mean)[:, None]
            worse = torch.minimum(
                advantage * ratio, advantage * ratio.clamp(min=1 - LOW, max=1 + HIGH)
            )
            clipped += int(((worse < advantage * ratio) & mask).sum())
            optimizer.zero_grad()
            (-(worse * mask).sum() / mask.sum()).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), settings_of().max_grad_norm)
            optimizer.step()
    assert clipped > 0
    assert len(trained.metrics) == passes * updates
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


def test_a_pass_more_costs_its_updates_and_no_log_probs():
    costs = [train(2, passes)[2] for passes in (1, 2, 3)]
    steps = [each.trained_steps for each in costs]
    assert steps == [steps[0], 2 * steps[0], 3 * steps[0]]
    assert costs[2].flops - costs[1].flops == costs[1].flops - costs[0].flops > 0


def with_passes(arm: str, passes: int, **changes: object) -> Parameters:
    """Returns params.yaml with an arm of several passes."""
    params = read_params(ROOT / "params.yaml")
    found = params.arms[arm]
    training = found.training.model_copy(update={"passes_per_iteration": passes, **changes})
    arms = {**params.arms, arm: found.model_copy(update={"training": training})}
    return params.model_copy(update={"arms": arms})


def test_a_budget_counts_every_pass():
    texts = pd.DataFrame({"prompt_id": ["a", "b"], "prompt": ["1+1=", "22+22="]})
    steps = pd.Series([3.0, 5.0]).to_numpy()

    def trained(passes: int) -> torch.Tensor:
        params = with_passes("composed", passes)
        price = build_price(
            params,
            "composed",
            base=ROOT,
            candidates=texts,
            training=lambda: training_costs(params, "composed"),
            policy=tiny_policy(),
        )
        assert price is not None
        return torch.from_numpy(price.rates(["a", "b"], steps).trained)

    one, two, three = map(trained, (1, 2, 3))
    torch.testing.assert_close(three - two, two - one)
    # One pass has the scores of the proximal policy beside it, which are a third of its FLOPs.
    assert bool((one < 1.5 * (two - one)).all())


def test_passes_make_an_iteration_off_policy_for_the_rules():
    """GSPO on fresh rollouts is GRPO (U10); in a second pass it is not."""
    found = [
        {each.rule for each in findings(params) if each.path.startswith("arms.plain")}
        for params in (
            _gspo(with_passes("plain", passes, updates_per_iteration=1)) for passes in (1, 2)
        )
    ]
    assert ["U10" in rules for rules in found] == [True, False]


def _gspo(params: Parameters) -> Parameters:
    arm = params.arms["plain"].model_copy(update={"objective": [{"gspo": {}}]})
    return params.model_copy(update={"arms": {**params.arms, "plain": arm}})
