"""New parts of a user: a file under plugins/ that works as it is, and its test."""

import keyword
from pathlib import Path
from typing import Literal, get_args

from grpo.errors import ArtifactError, ParameterError
from grpo.runtime.artifacts.files import write_bytes
from grpo.runtime.plugins import PLUGINS

EXAMPLES = Path("examples/parts")  # of every kind, with the names below
FUNCTION, CLASS = "my_part", "MyPart"
PartKind = Literal["judge", "task", "link", "selection", "curriculum"]
KINDS: tuple[PartKind, ...] = get_args(PartKind)
USES: dict[PartKind, str] = {
    "judge": "judge: plugins.{name}, an entry of reward.judges",
    "task": "kind: plugins.{name}, in the section task",
    "link": "plugins.{name}, an entry of arms.ARM.objective",
    "selection": "plugins.{name}, an entry of arms.ARM.selection",
    "curriculum": "plugins.{name}, an entry of arms.ARM.curriculum",
}


def write_part(kind: PartKind, name: str) -> list[Path]:
    """Writes plugins/NAME.py and plugins/test_NAME.py from the example of a kind.

    Raises:
      ParameterError: If the name is no name of a module of its own.
      ArtifactError: If a file is there already, or the examples are not.
    """
    is_name = name.isidentifier() and not keyword.iskeyword(name)
    if not is_name or name != name.lower() or name.startswith(("_", "test_")):
        raise ParameterError(
            f"{name}: must be the name of a Python file in small letters, such as shorter_answers"
        )
    made = {
        PLUGINS / f"{name}.py": EXAMPLES / f"{kind}.py",
        PLUGINS / f"test_{name}.py": EXAMPLES / f"test_{kind}.py",
    }
    for file, example in made.items():
        if file.exists():
            raise ArtifactError(f"{file}: is there already; choose another name")
        if not example.is_file():
            raise ArtifactError(f"{example}: is not here; run this in a clone of the repository")
    title = "".join(each.capitalize() for each in name.split("_"))
    for file, example in made.items():
        text = example.read_text(encoding="utf-8")
        write_bytes(file, text.replace(FUNCTION, name).replace(CLASS, title).encode())
    return [*made]


def describe_use(kind: PartKind, name: str) -> str:
    """Returns where params.yaml names a part."""
    return USES[kind].format(name=name)
