"""`import grpo` as a library: its names, and how it refuses invalid arguments."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from grpo.objective.links import ALGORITHMS, LINKS
from tests.objective.batches import OBJECTIVES, credit_of, nearby, ragged_rollouts
from tests.objective.every_link import EVERY
from tests.objective.test_broken import with_every_field

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
# Invalid arguments -> what the message must name.
WRONG = {
    "loss(1)": "logp must be floats of the shape [4, 2] of the credit's weights",
    "loss(proximal_logp=ok[:1])": "proximal_logp must be floats of the shape [4, 2]",
    "loss(proximal_logp=ok[:, :1])": "proximal_logp must be floats of the shape [4, 2]",
    "loss(proximal_logp=ok[0, 0])": "proximal_logp must be floats of the shape [4, 2]",
    "loss(proximal_logp=ok.long())": "got torch.int64",
    "loss(reference_logp=ok[:1])": "reference_logp must be floats",
    "loss(behavior_logp=ok[:1])": "behavior_logp must be floats",
    "loss(proximal_kl=ok[:1])": "proximal_kl must be floats",
    "loss(entropy=ok[:1])": "entropy must be floats",
    "loss(credit=grpo.Credit(advantage=ok, weight=ok.long()))": "weight must be floats",
    "loss(credit=grpo.Credit(advantage=ok[:1], weight=ok))": "advantage must be floats",
    "loss(credit=grpo.Credit(advantage=ok[:1], weight=ok[:1]))": "logp must be floats",
    "loss(objective=grpo.grpo(beta=0.1))": "needs reference_logp",
    "rollouts(mask=ok)": "Rollouts.mask must be bool, got torch.float32",
    "rollouts(mask=ok[0].bool())": "Rollouts.mask must have a shape [rollout, step], got [2]",
    "rollouts(mask=ok[:1].bool())": "Rollouts.group must have the shape [1] of the mask",
    "rollouts(reward=ok)": "Rollouts.reward must have the shape [4]",
    "rollouts(outcome=ok[0])": "Rollouts.outcome must have the shape [4]",
    "rollouts(group=torch.arange(3))": "Rollouts.group must have the shape [4]",
    "rollouts(group=torch.zeros(4))": "Rollouts.group must be integers, got torch.float32",
    "rollouts(behavior_logp=ok[:1])": "Rollouts.behavior_logp must have the shape [4, 2]",
    "rollouts(behavior_logp=ok.long())": "Rollouts.behavior_logp must be floats, got torch.int64",
    "rollouts(reference_logp=ok[:, :1])": "Rollouts.reference_logp must have the shape [4, 2]",
    "rollouts(noise=grpo.StepNoise(ok, ok, ok[:1]))": "Rollouts.noise.size must have the shape",
    "rollouts(variant=torch.arange(1))": "Rollouts.variant must have the shape [4]",
    "rollouts(chunks=grpo.ActionChunks(ok.long(), ok, ok.bool()))": "chunks.action must have",
    "rollouts(reward=torch.tensor([1, 0, float('nan'), 0]))": "finite, got nan in row 2",
    "rollouts(reward=torch.tensor([1e39, 0, 1, 0]))": "finite, got inf in row 0",
    "rollouts(behavior_logp=ok.log())": "Rollouts.behavior_logp must be finite, got -inf in row 0",
    "rollouts(reference_logp=ok.log())": "in row 0, step 0; correct it",
    "rollouts(reward=torch.zeros(4).cfloat())": "Rollouts.reward must be real numbers, got",
    "rollouts(outcome=torch.zeros(4).cfloat())": "Rollouts.outcome must be real numbers, got",
    "rollouts(group=torch.zeros(4).cfloat())": "Rollouts.group must be integers, got",
    "rollouts(variant=torch.zeros(4))": "Rollouts.variant must be integers, got torch.float32",
    "rollouts(reference_logp=ok.cfloat())": "Rollouts.reference_logp must be floats, got",
    "rollouts(reference_logp=ok.long())": "Rollouts.reference_logp must be floats, got",
    "rollouts(noise=grpo.StepNoise(ok, ok.long(), ok))": "Rollouts.noise.std must be floats",
    "rollouts(noise=ok)": "Rollouts.noise must be a grpo.StepNoise, got Tensor",
    "rollouts(chunks=ok)": "Rollouts.chunks must be a grpo.ActionChunks, got Tensor",
    "rollouts(parts=ok)": "Rollouts.parts must be a grpo.PartScores, got Tensor",
    "rollouts(parts=grpo.PartScores(ok, ok))": "Rollouts.parts.end must be integers",
    "rollouts(parts=grpo.PartScores(ok[:, :1].long(), ok))": "score must have the shape [4, 1]",
    "rollouts(parts=grpo.PartScores(ok[0].long(), ok[0]))": "parts.end must have the shape [4, 2]",
    "rollouts(parts=grpo.PartScores(ok.long() + 2, ok))": "end at steps of the mask, or be -1",
    "rollouts(parts=grpo.PartScores(ok.long() - 2, ok))": "got step -2 and score 0.0 in row 0",
    "rollouts(parts=grpo.PartScores(ok.long(), ok.log()))": "got step 0 and score -inf in row 0",
    "rollouts(noise=grpo.StepNoise(ok, None, ok))": "Rollouts.noise.std must be a torch.Tensor",
    "loss(noise=ok)": "noise must be a grpo.StepNoise, got Tensor",
    "loss(noise=grpo.StepNoise(ok, ok[:1], ok))": "noise.std must be floats of the shape [4, 2]",
    "loss(noise=grpo.StepNoise(ok, ok, ok.long()))": "noise.size must be floats",
    "loss(objective=grpo.loss_link(grpo.Link('own', {}), lambda terms: terms.with_loss(ok[:1])))": (
        "a link's loss must have the shape [4, 2] of the log-probs, got [1, 2]"
    ),
    "loss(credit=grpo.Credit(advantage=ok, weight=ok.tolist()))": "weight must be a torch.Tensor",
    "grpo.chain('rloo')": "chain takes objectives one by one",
    "grpo.chain([grpo.rloo()])": "chain takes objectives one by one",
    "grpo.chain(grpo.rloo)": "got <function rloo",
}
DTYPES = ("bool", "uint8", "int64", "float16", "bfloat16")
CREDIT_BY_DTYPE = f"""
def credit(dtype):
    value = torch.tensor([1.0, 0.0, 0.0, 1.0]).to(dtype)
    objective = grpo.chain(grpo.grpo(), grpo.drop_uniform_groups())
    given = rollouts(reward=value, outcome=value)
    return grpo.assign_credit(objective, given, {{}}, torch.Generator())[0]
expected = credit(torch.float32)
for name in {DTYPES}:
    found = credit(getattr(torch, name))
    print(
        name,
        found.weight.dtype == found.advantage.dtype == torch.float32,
        torch.equal(found.weight, expected.weight),
        torch.equal(found.advantage, expected.advantage),
    )
"""
NO_TENSORS = {"ok.tolist()": "list", "ok.numpy()": "ndarray", "ok.numpy().astype(bool)": "ndarray"}
WRONG |= {
    f"{call}({name}={given})": f"{name} must be a torch.Tensor, got {found}; use torch.tensor(...)"
    for call, names in {
        "rollouts": ("group", "reward", "outcome", "mask", "behavior_logp", "reference_logp"),
        "loss": ("logp", "proximal_logp", "reference_logp", "behavior_logp", "reference_kl"),
    }.items()
    for name in names
    for given, found in NO_TENSORS.items()
}


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What a process without jaxtyping's checks, as a user's is, says of WRONG and of DTYPES."""
    lines = [START]
    for each in WRONG:
        lines += ["try:", f"    {each}", "    print('passed')"]
        lines += ["except ValueError as error:", "    print(error)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, CREDIT_BY_DTYPE])],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return done.stdout.splitlines()


def test_what_does_not_fit_is_refused_in_one_line_that_names_it(said: list[str]):
    for (what, expected), message in zip(WRONG.items(), said[: len(WRONG)], strict=True):
        assert expected in message, (what, message)


def test_rewards_of_any_dtype_give_the_credit_of_floats(said: list[str]):
    """Integers and booleans are no Float for jaxtyping."""
    assert said[len(WRONG) :] == [f"{name} True True True" for name in DTYPES]


@pytest.mark.parametrize("name", EVERY)
@given(rollouts=ragged_rollouts(), seed=st.integers(0, 99))
@settings(max_examples=3, deadline=None)
def test_all_but_the_policy_is_constant_whether_it_is_detached_or_not(
    name: str, rollouts: grpo.Rollouts, seed: int
):
    """Log-probs of other policies and inputs of credit, to the bit."""
    objective = grpo.chain(EVERY[name], grpo.clip_surrogate())  # a gradient for credit links, too
    whole = with_every_field(rollouts, seed)
    start = nearby(rollouts, seed).float()
    gradients = []
    for cut in (torch.Tensor.detach, lambda value: value):
        logp = start.clone().requires_grad_()
        noise = grpo.StepNoise(*(cut(each + 0 * logp) for each in whole.noise))
        given = replace(
            whole,
            reward=cut(whole.reward + logp.sum(dim=1)),
            behavior_logp=cut(logp * 1.01),
            reference_logp=cut(logp * 1.1),
            noise=noise,
        )
        credit = credit_of(objective, given)
        credit = replace(
            credit, advantage=cut(credit.advantage + logp), weight=cut(credit.weight * -logp)
        )
        terms = grpo.loss_terms(
            objective,
            logp=logp,
            proximal_logp=cut(logp),
            reference_logp=cut(logp * 1.1),
            behavior_logp=cut(logp * 1.01),
            proximal_kl=logp.square(),
            reference_kl=logp.square(),
            entropy=logp.square(),
            noise=noise,
            credit=credit,
        )
        grpo.scalar_loss(terms, credit).backward()
        gradients.append(logp.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype):
    """exp(15) is no float16."""
    whole = torch.tensor([[-16.0, -0.5], [-1.0, -1.5]], dtype=dtype)
    credit = grpo.Credit(advantage=torch.tensor([[1.0, -1.0], [2.0, 1.0]]), weight=torch.ones(2, 2))
    found = []
    for start in (whole, whole.float()):
        logp = (start + torch.tensor([[15.0, 0], [0, 0]], dtype=start.dtype)).requires_grad_()
        terms = grpo.loss_terms(
            grpo.chain(grpo.truncate_mismatch(3.0), grpo.grpo(beta=0.1)),
            logp=logp,
            proximal_logp=start,
            reference_logp=start,
            behavior_logp=start - 15,
            credit=credit,
        )
        loss = grpo.scalar_loss(terms, credit)
        loss.backward()
        assert logp.grad.dtype == start.dtype
        found.append((loss.detach(), logp.grad.to(dtype)))
    assert found[0][0].isfinite()
    assert all(map(torch.equal, *found))


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
            entropy=nothing,
            credit=credit,
        )
        assert float(grpo.scalar_loss(terms, credit).detach()) == 0


def test_the_library_has_every_link_and_every_algorithm():
    for name, each in {**LINKS, **ALGORITHMS}.items():
        assert getattr(grpo, name) is each
        assert name in dir(grpo)
    with pytest.raises(AttributeError, match="no attribute 'gpro'"):
        grpo.gpro  # noqa: B018


def test_links_and_algorithms_are_modules_of_the_library():
    for name, each in LINKS.items():
        assert getattr(grpo.links, name) is each
        assert name in dir(grpo.links)
    for name, each in ALGORITHMS.items():
        assert getattr(grpo.algorithms, name) is each
    with pytest.raises(AttributeError, match=r"'grpo\.links' has no attribute 'rlo'"):
        grpo.links.rlo  # noqa: B018


def test_the_library_checks_a_parameter_file(tmp_path: Path):
    recipe = (ROOT / "recipes" / "smoke.yaml").read_text()
    (tmp_path / "sound.yaml").write_text(recipe)
    assert not [each for each in grpo.check(tmp_path / "sound.yaml") if " ERROR " in each]
    both = recipe.replace("- rloo: {low: 0.2, high: 0.28}", "- rloo: {}\n      - dapo: {}")
    (tmp_path / "unsound.yaml").write_text(both)
    assert " ERROR arms.sgpo.objective" in grpo.check(str(tmp_path / "unsound.yaml"))[0]


def test_importing_the_library_or_a_submodule_of_it_loads_no_torch():
    modules = "grpo, grpo.allocation.selection, grpo.errors"
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()


def test_the_pages_example_needs_the_library_alone():
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs/objective.md").read_text(), re.S)
    modules = re.findall(r"^(?:import|from) (\S+)", "\n".join(found), re.M)
    assert sorted(modules) == ["grpo", "torch"]


def test_no_algorithm_asks_for_a_reference_unless_a_penalty_is_asked_for():
    for objective in (grpo.grpo(), grpo.dr_grpo(horizon=8), grpo.dapo(), grpo.rloo()):
        assert not any(link.settings.get("beta") for link in objective.links)
