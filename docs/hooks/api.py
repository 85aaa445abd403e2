"""Hook of mkdocs: `<!-- api: NAMES -->` on a page becomes the docstrings of these names of grpo."""

import inspect
import re
import sys
from itertools import groupby
from typing import Any

import grpo
from grpo.objective.links import ALGORITHMS, LINKS

MARK = re.compile(r"<!-- api: (.*?) -->")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return MARK.sub(lambda mark: directives(mark[1]), markdown)


def directives(names: str) -> str:
    """Returns the directives of mkdocstrings for names of grpo, `algorithms` or `links`."""
    if names == "algorithms":
        return "\n".join(map(directive, ALGORITHMS.values()))
    if names == "links":
        by_module = groupby(LINKS.values(), key=lambda link: link.__module__)
        return "\n".join(
            f"## {module.rpartition('.')[2]}\n\n{inspect.getdoc(sys.modules[module])}\n\n"
            + "\n".join(map(directive, links))
            for module, links in by_module
        )
    return "\n".join(directive(getattr(grpo, name)) for name in names.split())


def directive(named: Any) -> str:
    return f"::: {named.__module__}.{named.__name__}"
