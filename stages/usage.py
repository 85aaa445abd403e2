"""`python -m stages.NAME --help`, read from the source of the stage: its imports take seconds."""

import ast
import sys
from pathlib import Path


def print_usage() -> None:
    """Prints what the stage of this `python -m` does, and the paths that it takes."""
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    tree = ast.parse(Path(__file__).with_name(f"{module.split('.')[-1]}.py").read_text())
    described = [ast.get_docstring(tree) or ""]
    paths: list[str] = []
    for each in tree.body:
        if isinstance(each, ast.FunctionDef) and each.name == "main":
            described.append(ast.get_docstring(each) or "")
            paths = [path.arg for path in each.args.args if path.arg != "usage"]
    print(f"usage: python -m {module}", *(path.upper() for path in paths), end="\n\n")
    print("\n\n".join(filter(None, described)))
    print("\ndvc.yaml has the paths: dvc repro -s STAGE runs a stage, dvc repro all of them.")
