"""Hook of mkdocs: formulas become MathML, which browsers show without a script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex makes of $...$ and $$...$$.
FORMULA = re.compile(r'class="arithmatex">\\([(\[])(.*?)\\[)\]]<', re.S)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    return FORMULA.sub(as_mathml, content)


def as_mathml(formula: re.Match[str]) -> str:
    display = "inline" if formula[1] == "(" else "block"
    return f'class="formula">{convert(html.unescape(formula[2]), display=display)}<'
