"""Prompts that hold an image: Markdown with the encoded image inside, followed by the question.

The image travels with the prompt, so every worker sees it without a shared folder, and it is
traced as the prompt is.
"""

import base64
import re

from grpo.errors import ParameterError, brief
from grpo.schema import PARAMS

IMAGE = re.compile(r"!\[\]\(data:image/[a-z]+;base64,([A-Za-z0-9+/]+=*)\)")
SHOWN = "[image] "  # in place of the encoded image where people read prompts


def join_prompt(png: bytes, question: str) -> str:
    """Returns the prompt of a question about an image: "![](data:image/png;base64,...)Where?"."""
    return f"![](data:image/png;base64,{base64.b64encode(png).decode()}){question}"


def split_prompt(prompt: str) -> tuple[bytes, str]:
    """Returns the encoded image of a prompt and its question.

    Raises:
      ParameterError: If the prompt does not begin with an image.
    """
    found = IMAGE.match(prompt)
    if found is None:
        raise ParameterError(
            f"{PARAMS}: task must give prompts that begin with an image, "
            f"![](data:image/png;base64,...), got {brief(repr(prompt))}"
        )
    return base64.b64decode(found[1]), prompt[found.end() :]


def without_images(text: str) -> str:
    """Returns a text for people: "[image] Where?"."""
    return IMAGE.sub(SHOWN, text)
