"""`import grpo` as a library: what it has, and what it does with what does not fit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from grpo.build.objectives import ALGORITHMS, LINKS
from tests.objective.batches import OBJECTIVES, credit_of, nearby, ragged_rollouts

ROOT = Path(__file__).parents[1]
START = """
import torch, grpo
def rollouts(count=4, **other):
    value = torch.tensor([1.0, 0.0] * (count // 2))
    return grpo.Rollouts(**{**dict(group=torch.arange(count) // 2, reward=value, outcome=value,
        mask=torch.ones(count, 2, dtype=torch.bool), behavior_logp=torch.zeros(count, 2)), **other})
def loss(count=4, objective=grpo.rloo(), **other):
    credit, _ = grpo.assign_credit(objective, rollouts(), {}, torch.Generator())
    logp = torch.zeros(count, 2, requires_grad=True)
    terms = grpo.loss_terms(objective, **{**dict(
        logp=logp, proximal_logp=logp, reference_logp=None, credit=credit), **other})
    return grpo.scalar_loss(terms, credit)
ok = torch.zeros(4, 2)
"""
# What is wrong -> what the message must name.
WRONG = {
    "loss(1)": "logp must be floats of the shape [4, 2] of the credit's weights",
    "loss(proximal_logp=ok[:1])": "proximal_logp must be floats of the shape [4, 2]",
    "loss(proximal_logp=ok[:, :1])": "proximal_logp must be floats of the shape [4, 2]",
    "loss(proximal_logp=ok[0, 0])": "proximal_logp must be floats of the shape [4, 2]",
    "loss(proximal_logp=ok.long())": "got torch.int64",
    "loss(reference_logp=ok[:1])": "reference_logp must be floats",
    "loss(behavior_logp=ok[:1])": "behavior_logp must be floats",
    "loss(proximal_kl=ok[:1])": "proximal_kl must be floats",
    "loss(credit=grpo.Credit(advantage=ok, weight=ok.long()))": "weight must be floats",
    "loss(credit=grpo.Credit(advantage=ok[:1], weight=ok))": "advantage must be floats",
    "loss(credit=grpo.Credit(advantage=ok[:1], weight=ok[:1]))": "logp must be floats",
    "loss(objective=grpo.grpo(beta=0.1))": "needs reference_logp",
    "rollouts(mask=ok)": "Rollouts.mask must be bool of shape [rollout, step]",
    "rollouts(mask=ok[0].bool())": "Rollouts.mask must be bool of shape [rollout, step]",
    "rollouts(mask=ok[:1].bool())": "Rollouts.group must have the shape [1] of the mask",
    "rollouts(reward=ok)": "Rollouts.reward must have the shape [4]",
    "rollouts(outcome=ok[0])": "Rollouts.outcome must have the shape [4]",
    "rollouts(group=torch.arange(3))": "Rollouts.group must have the shape [4]",
    "rollouts(group=torch.zeros(4))": "integers as group",
    "rollouts(behavior_logp=ok[:1])": "Rollouts.behavior_logp must have the shape [4, 2]",
    "rollouts(behavior_logp=ok.long())": "floats as behavior_logp",
    "rollouts(reference_logp=ok[:, :1])": "Rollouts.reference_logp must have the shape [4, 2]",
    "rollouts(noise=grpo.StepNoise(ok, ok, ok[:1]))": "Rollouts.noise.size must have the shape",
    "rollouts(variant=torch.zeros(1))": "Rollouts.variant must have the shape [4]",
    "rollouts(chunks=grpo.ActionChunks(ok.long(), ok, ok.bool()))": "chunks.action must have",
    "rollouts(reward=torch.tensor([1, 0, float('nan'), 0]))": "finite, got nan in row 2",
    "rollouts(reward=torch.tensor([1e39, 0, 1, 0]))": "finite, got inf in row 0",
}


def test_what_does_not_fit_is_refused_in_one_line_that_names_it():
    """In a process without jaxtyping's checks, as a user's is."""
    lines = [START]
    for each in WRONG:
        lines += ["try:", f"    {each}", "    print('passed')"]
        lines += ["except ValueError as error:", "    print(error)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    found = done.stdout.splitlines()
    assert len(found) == len(WRONG)
    for (what, expected), message in zip(WRONG.items(), found, strict=True):
        assert expected in message, (what, message)


@pytest.mark.parametrize("name", OBJECTIVES)
@given(rollouts=ragged_rollouts(), seed=st.integers(0, 99))
@settings(max_examples=3, deadline=None)
def test_other_policies_are_constants_whether_they_are_detached_or_not(
    name: str, rollouts: grpo.Rollouts, seed: int
):
    objective, credit = OBJECTIVES[name], credit_of(OBJECTIVES[name], rollouts)
    gradients = []
    for cut in (torch.Tensor.detach, lambda value: value):
        logp = nearby(rollouts, seed).float().requires_grad_()
        terms = grpo.loss_terms(
            objective,
            logp=logp,
            proximal_logp=cut(logp),
            reference_logp=cut(logp * 1.1),
            behavior_logp=cut(logp * 1.01),
            credit=credit,
        )
        grpo.scalar_loss(terms, credit).backward()
        gradients.append(logp.grad)
    assert torch.equal(*gradients)


def test_rewards_of_any_dtype_give_the_credit_of_floats():
    """In such a process, too: integers and booleans are no Float for jaxtyping."""
    code = (
        START
        + """
def credit(dtype):
    value = torch.tensor([1.0, 0.0, 0.0, 1.0]).to(dtype)
    objective = grpo.chain(grpo.grpo(), grpo.drop_uniform_groups())
    given = rollouts(reward=value, outcome=value)
    return grpo.assign_credit(objective, given, {}, torch.Generator())[0]
expected = credit(torch.float32)
for name in ("bool", "uint8", "int64", "float16", "bfloat16"):
    found = credit(getattr(torch, name))
    assert found.weight.dtype == found.advantage.dtype == torch.float32, name
    assert torch.equal(found.weight, expected.weight), name
    assert torch.equal(found.advantage, expected.advantage), name
"""
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_loss_of_an_empty_batch_is_0():
    nothing = torch.zeros(0, 2, requires_grad=True)
    credit = grpo.Credit(advantage=nothing.detach(), weight=nothing.detach())
    for objective in OBJECTIVES.values():
        terms = grpo.loss_terms(
            objective,
            logp=nothing,
            proximal_logp=nothing,
            reference_logp=nothing,
            behavior_logp=nothing,
            credit=credit,
        )
        assert float(grpo.scalar_loss(terms, credit).detach()) == 0


def test_the_library_has_every_link_and_every_algorithm():
    for name, each in {**LINKS, **ALGORITHMS}.items():
        assert getattr(grpo, name) is each
        assert name in dir(grpo)
    with pytest.raises(AttributeError, match="no attribute 'gpro'"):
        grpo.gpro  # noqa: B018


def test_importing_the_library_or_a_submodule_of_it_loads_no_torch():
    code = "import sys, grpo; from grpo import selection; import grpo.errors; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()


def test_the_pages_example_needs_the_library_alone():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/objective.md").read_text(), re.S)
    modules = re.findall(r"^(?:import|from) (\S+)", example, re.M)
    assert sorted(modules) == ["grpo", "torch"]


def test_no_algorithm_asks_for_a_reference_unless_a_penalty_is_asked_for():
    for objective in (grpo.grpo(), grpo.dr_grpo(horizon=8), grpo.dapo(), grpo.rloo()):
        assert not any(link.settings.get("beta") for link in objective.links)
