"""Hook of mkdocs: files outside docs/ that pages link to become part of the site."""

import re
from os.path import relpath
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

log = get_plugin_logger(__name__)
DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s#]+")  # to a file, without its anchor
PAGES_OF_ROOT = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
SHOWN_AS_PAGE = (".yaml", ".py")  # in a block of code; other files are copied
origin_by_uri: dict[str, Path] = {}


def uri_of(path: Path) -> str:
    """Returns the place on the site of a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    suffix = ".md" if path.suffix in SHOWN_AS_PAGE else ""
    return f"repository/{path.relative_to(ROOT).as_posix()}{suffix}"


def on_files(files: Any, config: Any) -> None:
    """Adds each linked file outside docs/; a missing one is a warning, as within docs/."""
    origin_by_uri.clear()
    origin_by_uri.update(
        (page.src_uri, DOCS / page.src_uri) for page in files.documentation_pages()
    )
    paths = [*origin_by_uri.values(), *PAGES_OF_ROOT]
    for path in paths:  # grows
        if not path.is_relative_to(DOCS):
            if not path.is_file():
                log.warning(f"a page links to {path.relative_to(ROOT)}, which is not a file")
                continue
            text = path.read_text()
            if path.suffix in SHOWN_AS_PAGE:
                text = f"# {path.name}\n\n```{path.suffix[1:]}\n{text}```\n"
            files.append(File.generated(config, uri_of(path), content=text))
            origin_by_uri[uri_of(path)] = path
        if path.suffix == ".md":
            targets = {(path.parent / link).resolve() for link in LINK.findall(path.read_text())}
            outside = {each for each in targets if not each.is_relative_to(DOCS)}
            paths += sorted(outside.difference(paths))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns the page with each link pointing to the place of its target on the site."""
    origin, uri = origin_by_uri[page.file.src_uri], Path(page.file.src_uri)
    if origin.suffix != ".md":
        return markdown
    return LINK.sub(
        lambda link: relpath(uri_of((origin.parent / link[0]).resolve()), uri.parent), markdown
    )
