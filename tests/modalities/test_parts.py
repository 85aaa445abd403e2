"""Parts of texts: the token that holds the last character of each, for several tokenizers."""

from bisect import bisect_left
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo.modalities.shared.texts import decode_texts, find_steps
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from tests.modalities.tiny import seeded, tiny_policy
from tests.modalities.tiny_denoiser import tiny_denoiser

CORPUS = [
    "48,18 30,18 12,18 12,06 #6",
    "Größe: 3 €, naïve 日本語 日本",
    "one two three two one",
] * 4


def make_bpe() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer whose tokens may hold a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_pieces() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of word pieces, as SentencePiece has them: a space begins a piece."""
    pieces = ["<pad>", "<eos>", "▁one", "▁two", "▁th", "ree", "▁"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


BPE, PIECES, CHARACTERS = make_bpe(), make_pieces(), make_byte_tokenizer()


def steps_of(tokenizer: PreTrainedTokenizerFast, ids: list[int], ends: list[int]) -> list[int]:
    """Returns the steps of one rollout, beside a longer one."""
    tokens = torch.tensor([ids + [0] * 3, [*ids, *ids[:1]] + [0] * 2])
    mask = torch.arange(tokens.shape[1]) < torch.tensor([[len(ids)], [len(ids) + 1]])
    return find_steps(tokenizer, tokens, mask, [ends, []])[0]


@pytest.mark.parametrize(
    ("tokenizer", "pieces", "parts"),
    [
        # The parts "one" and " three" end with the last token of each.
        (
            PIECES,
            ["▁one", "▁two", "▁th", "ree", "<eos>"],
            {"one": 0, "one two": 1, "one two three": 3},
        ),
        # A special token in the middle has no characters.
        (PIECES, ["▁one", "<eos>", "▁two"], {"one": 0, "one two": 2}),
        # A character of two bytes is complete with the second one.
        (CHARACTERS, ["a", "Ã", "©", "b", "<eos>"], {"a": 0, "aé": 2, "aéb": 3}),
    ],
    ids=["pieces", "special", "bytes"],
)
def test_a_part_ends_with_the_token_of_its_last_character(
    tokenizer: PreTrainedTokenizerFast, pieces: list[str], parts: dict[str, int]
):
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert steps_of(tokenizer, ids, [len(each) for each in parts]) == [*parts.values()]


@pytest.mark.parametrize("tokenizer", [BPE, CHARACTERS], ids=["bpe", "characters"])
@given(text=st.text("48, é€日本語-#ön\n😀", min_size=1, max_size=30), data=st.data())
@settings(max_examples=40, deadline=None)
def test_ends_agree_with_the_bytes_of_tokens(
    tokenizer: PreTrainedTokenizerFast, text: str, data: st.DataObject
):
    """The token in which the last byte of the part's last character is; special ones have none."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    for _ in range(data.draw(st.integers(0, 2))):
        ids.insert(data.draw(st.integers(0, len(ids))), tokenizer.eos_token_id)
    special = set(tokenizer.all_special_ids)
    num_bytes = [
        0 if each in special else len(tokenizer.convert_ids_to_tokens(each)) for each in ids
    ]
    read = [*accumulate(num_bytes)]
    ends = [*range(1, len(text) + 1)]
    expected = [bisect_left(read, len(text[:end].encode())) for end in ends]
    assert steps_of(tokenizer, ids, ends) == expected


@given(st.lists(st.integers(3, 258), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_bytes_that_are_no_text_have_a_step_too(ids: list[int]):
    """A policy of bytes samples them; steps rise, and each completes its characters."""
    (text,) = decode_texts(CHARACTERS, torch.tensor([ids]), torch.ones(1, len(ids)).bool())
    ends = [*range(1, len(text) + 1)]
    steps = steps_of(CHARACTERS, ids, ends)
    assert steps == sorted(steps)
    for end, step in zip(ends, steps):
        assert CHARACTERS.decode(ids[: step + 1])[:end] == text[:end]


def test_a_policy_counts_sampled_tokens_and_no_prompt():
    policy = tiny_policy(max_steps=8)
    trajectory, _ = policy.sample(["12+3=", "4"], group_sizes=[2, 3], generator=seeded())
    texts = policy.decode(trajectory)
    found = policy.find_steps(trajectory, [[len(text)] if text else [] for text in texts])
    for text, steps, tokens, mask in zip(texts, found, trajectory.tokens, trajectory.mask):
        for step in steps:
            assert mask[step]
            assert policy.tokenizer.decode(tokens[: step + 1], skip_special_tokens=True) == text
            assert policy.tokenizer.decode(tokens[:step], skip_special_tokens=True) != text


def test_images_have_no_parts():
    policy = tiny_denoiser()
    trajectory, _ = policy.sample(["a"], group_sizes=[2], generator=seeded())
    with pytest.raises(ValueError, match="are not texts with parts"):
        policy.find_steps(trajectory, [[1], [1]])
