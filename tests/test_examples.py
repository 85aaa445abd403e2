"""The examples run and do what they claim."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from transformers import GPT2Config, GPT2LMHeadModel

import grpo
from examples import own_loop

EXAMPLES = Path(__file__).parents[1] / "examples"
NUM_SAMPLED = own_loop.UPDATES * own_loop.PROMPTS * own_loop.ROLLOUTS_PER_GROUP


@pytest.fixture
def forwarded_rows() -> Iterator[list[int]]:
    """The rows of every forward pass with a graph, of any GPT-2: sampling has none."""
    rows = []

    def count(module: torch.nn.Module, _: object, output: object) -> None:
        if isinstance(module, GPT2LMHeadModel) and torch.is_grad_enabled():
            rows.append(len(output.logits))

    handle = register_module_forward_hook(count)
    yield rows
    handle.remove()


def require_learning(rewards: list[float], forwarded: list[int]) -> None:
    """A random answer is right once in 64 times."""
    assert rewards[0] < 0.1
    assert sum(rewards[-10:]) / 10 > 0.85
    assert 0 < sum(forwarded) < 0.7 * NUM_SAMPLED


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_the_loop_learns_and_forwards_only_rollouts_with_weight(
    seed: int, forwarded_rows: list[int]
):
    rewards, forwarded = own_loop.train(seed)
    require_learning(rewards, forwarded)
    assert forwarded_rows == [each for each in forwarded if each > 0]


def test_the_script_says_what_it_learned_and_saved_and_repeats_itself(
    capsys: pytest.CaptureFixture[str], forwarded_rows: list[int]
):
    """With seed 0."""
    names = runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    require_learning(names["rewards"], names["forwarded"])
    assert forwarded_rows == [each for each in names["forwarded"] if each > 0]
    reward, forwarded = capsys.readouterr().out.splitlines()
    assert reward.startswith("mean reward: 0.0")
    assert forwarded == f"forwarded: {sum(names['forwarded'])} of {NUM_SAMPLED} rollouts"
    start = names["rewards"][:10], names["forwarded"][:10]
    assert own_loop.train(seed=0, num_updates=10) == start


def test_rows_of_weight_0_do_not_change_the_gradient_of_the_loop():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(**own_loop.MODEL, bos_token_id=None, eos_token_id=None, initializer_range=0.1)
    ).eval()
    group = torch.arange(32).repeat_interleave(8)
    prompts = torch.randint(own_loop.DIGITS, (32, own_loop.LENGTH))[group]
    tokens, logp = own_loop.sample(model, prompts)
    reward = tokens[:, -1] == 3
    rollouts = grpo.Rollouts(
        group=group,
        reward=reward,
        outcome=reward,
        mask=torch.ones_like(logp, dtype=torch.bool),
        behavior_logp=logp,
    )
    objective = grpo.algorithms.dapo()
    credit, _ = grpo.assign_credit(objective, rollouts, objective.init(), torch.Generator())

    def gradient(rows: Tensor) -> Tensor:
        model.zero_grad()
        new, part = own_loop.log_prob(model, tokens[rows]), credit.select(rows)
        grpo.loss(objective, logp=new, proximal_logp=logp[rows], credit=part).backward()
        return torch.cat([each.grad.flatten() for each in model.parameters()])

    weighted = credit.weighted_rows
    assert 0 < len(weighted) < len(group)
    assert gradient(weighted).abs().max() > 1e-3
    torch.testing.assert_close(
        gradient(weighted), gradient(torch.arange(len(group))), rtol=0, atol=1e-6
    )


def test_the_loop_fits_on_60_lines():
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) <= 60


def test_the_cells_of_the_notebook_run_in_order():
    """The claims are asserts. A kernel would make Jupyter a test dependency."""
    plt.switch_backend("agg")
    cells = json.loads((EXAMPLES / "objectives.ipynb").read_text())["cells"]
    namespace = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], f"clear the outputs of the cell {cell['id']}"
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), namespace)
    plt.close("all")
