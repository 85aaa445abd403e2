"""The laws of vision-language and encoder-decoder policies on a GPU: run with `pytest -m gpu`."""

from functools import partial

import pytest
import torch

from grpo.modalities.shared.text_policy import TextPolicy
from tests.modalities import test_seq2seq, test_vision_language
from tests.modalities.tiny import seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("kind", test_vision_language.BASES)
def test_answers_to_images_are_scored_as_they_were_drawn(kind: str):
    require_equal_scores(test_vision_language.policy_of(kind), test_vision_language)


@pytest.mark.parametrize("kind", test_seq2seq.KINDS)
def test_translations_are_scored_as_they_were_drawn(kind: str):
    require_equal_scores(test_seq2seq.policy_of(kind), test_seq2seq)


def require_equal_scores(policy: TextPolicy, inputs) -> None:
    """Fails unless log-probs of sampling on a GPU equal those of scoring there and on the CPU."""
    close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
    policy.model.to("cuda")
    trajectory, sampled = policy.sample(
        inputs.PROMPTS, group_sizes=inputs.SIZES, generator=seeded()
    )
    with torch.no_grad():
        on_gpu = policy.log_prob(trajectory).cpu()
        policy.model.to("cpu")
        on_cpu = policy.log_prob(trajectory)
    close(on_gpu, sampled)
    close(on_cpu, on_gpu)
