"""Tokens of languages in multilingual tokenizers, such as those of NLLB and M2M100."""

from typing import Any


def find_language_token(tokenizer: Any, language: str) -> int | None:
    """Returns the token of a language, e.g. of fra_Latn (NLLB) or fr (M2M100); None: there is none.

    M2M100 spells it __fr__, which comes first: `fr` itself may be a piece of a word.
    """
    for spelling in (f"__{language}__", language):
        token = tokenizer.convert_tokens_to_ids(spelling)
        if token is not None and token != tokenizer.unk_token_id:
            return int(token)
    return None
