"""A tiny chunked policy of the class that recipes load, in environments of two numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import LlamaConfig, LlamaModel

from grpo.modalities.action_chunks.modality import ChunkDecoding
from grpo.modalities.action_chunks.model import ActionChunkModel, ChunkShape
from grpo.modalities.action_chunks.phases import choose_labeller
from grpo.modalities.action_chunks.policy import ActionChunkPolicy
from grpo.modalities.action_chunks.simulation.pool import EnvironmentPool
from grpo.modalities.shared.tokenizers import make_word_tokenizer

SHAPE = ChunkShape(observations=1, pixels=0, length=2, actions=2, bins=5, positions=2)
SCENES = ["goes on | 0", "solves | 3", "solves it all | 0"]  # what | at which step


def tiny_model(seed: int = 0) -> ActionChunkModel:
    """Returns two layers with sharp random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    model = ActionChunkModel(LlamaModel(config), SHAPE)
    torch.nn.init.normal_(model.head.weight, std=0.3)
    model.get_buffer("scale").fill_(10.0)
    return model.eval()


@contextmanager
def tiny_actor(
    *, slots: int = 3, processes: int = 1, temperature: float = 1.0, seed: int = 0
) -> Iterator[ActionChunkPolicy]:
    """Yields a policy of at most four chunks of two actions."""
    with EnvironmentPool(
        "tests.modalities.faulty:Faulty", processes=processes, timeout_seconds=1.0
    ) as pool:
        yield ActionChunkPolicy(
            tiny_model(seed),
            make_word_tokenizer(["goes on solves it all raises nan"]),
            decoding=ChunkDecoding(temperature=temperature, max_steps=4),
            scenes=pool,
            slots=slots,
            label=choose_labeller("time", max_steps=4),
        )
