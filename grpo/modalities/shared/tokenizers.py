"""Tokenizers without files: byte level for any text, and word level for few words."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, START, END, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
BYTES = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte tokenizer with three special tokens for a causal LM."""
    return _of_tokens([PAD, START, END, *BYTES], f"{START} $A")


def make_caption_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte tokenizer whose end token has the largest id.

    CLIP pools at the end token, or at the largest id.
    """
    return _of_tokens([PAD, START, *BYTES, END], f"{START} $A {END}")


def make_word_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Returns a word tokenizer with the vocabulary of some texts."""
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {token: index for index, token in enumerate([PAD, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN)


def make_marked_tokenizer(texts: Sequence[str], marks: Sequence[str]) -> PreTrainedTokenizerFast:
    """Returns a word tokenizer with start and end tokens and special tokens for `marks`."""
    words = sorted({word for text in texts for word in text.split()})
    special = [PAD, START, END, UNKNOWN, *marks]
    vocabulary = {token: index for index, token in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=list(marks),
        clean_up_tokenization_spaces=False,
    )


def _of_tokens(tokens: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """Returns a byte tokenizer; $A in `template` stands for the bytes of a text."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [each for each in template.split() if each != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(each, vocabulary[each]) for each in marks]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        clean_up_tokenization_spaces=False,
    )
