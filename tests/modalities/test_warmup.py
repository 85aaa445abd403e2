"""The warm-up on texts: its loss is that of the model's class, whatever the lengths of the rows."""

import pytest
import torch

from grpo.modalities.shared.warmup import WarmupSettings, warm_up
from tests.modalities.tiny import tiny_policy

PAIRS = [("2+2=", "#4"), ("S", "1+2=3 3+4=7 7+5=12#12"), ("longer prompt=", "x"), ("B7=", "abc#")]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_the_loss_of_an_update_is_the_mean_over_the_tokens_of_its_solutions(rows: int):
    policy = tiny_policy()
    model, tokenizer = policy.model, policy.tokenizer
    settings = WarmupSettings(updates=1, rows_per_update=rows, learning_rate=1e-3, seed=0)
    total, count = 0.0, 0
    with torch.no_grad():
        for prompt, solution in PAIRS[:rows]:
            read = tokenizer(prompt)["input_ids"]
            written = tokenizer(solution, add_special_tokens=False)["input_ids"]
            written = [*written, tokenizer.eos_token_id]
            tokens = torch.tensor([read + written])
            labels = tokens.clone()
            labels[:, : len(read)] = -100
            total += float(model(input_ids=tokens, labels=labels).loss) * len(written)
            count += len(written)
    (update,) = warm_up(model, tokenizer, PAIRS[:rows], settings)
    assert update.loss == pytest.approx(total / count, abs=1e-5)
    assert update.cost.trained_steps == count
