"""The command line: parameters, advice, lineage, report; policies in, out and sampled from."""

from grpo.runtime.process import EXIT_INTERRUPTED, raise_interrupts, stop_at_once

if __name__ == "__main__":
    stop_at_once("stopped")

# Slow imports come after the signal handler is set.
import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo.errors import GrpoError

ARTIFACTS = Path("artifacts")
EXIT_WRONG_INPUT = 2
EXIT_CLOSED_PIPE = 128 + signal.SIGPIPE  # a shell's exit code for `yes` in `yes | head`


def main() -> None:
    """Runs one command; a GrpoError becomes one line on stderr and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters
        sys.stdout.reconfigure(errors="backslashreplace")
    with _exit_on_closed_pipe():
        arguments = _parser().parse_args()
        try:
            raise_interrupts()
            # Imported here to keep --help fast.
            from grpo.runtime.artifacts.files import refused_by_the_system, require_plain

            with refused_by_the_system():
                for path in vars(arguments).values():
                    if isinstance(path, Path):
                        require_plain(path)
                sys.exit(arguments.run(arguments))
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            sys.exit(EXIT_INTERRUPTED)
        except GrpoError as error:
            print(" ".join(str(error).split()), file=sys.stderr)
            sys.exit(EXIT_WRONG_INPUT)


@contextmanager
def _exit_on_closed_pipe() -> Iterator[None]:
    """Exits without a message if the reader of stdout has closed the pipe, as `| head` does.

    SIGPIPE stays ignored: its default action would also end the process when a server closes a
    connection.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # an error at interpreter exit could not be caught
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_CLOSED_PIPE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m grpo", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="list what is wrong or unsound in a parameter file")
    check.add_argument("file", type=Path, nargs="?", default=Path("params.yaml"))
    check.set_defaults(run=_check)
    params = commands.add_parser("params", help="print a recipe with all that it extends")
    params.add_argument("file", type=Path, nargs="?", default=Path("params.yaml"))
    params.add_argument("--write", action="store_true", help="write it to params.yaml instead")
    params.set_defaults(run=_params)
    init = commands.add_parser("init", help="write a recipe for a model directory of your own")
    init.add_argument("--recipe", type=Path, required=True, help="of recipes/: a name or a file")
    init.add_argument("--model", type=Path, required=True, help="a directory under data/")
    init.add_argument("--out", type=Path, help="default: the directory's name with .yaml")
    init.add_argument("--no-load", action="store_true", help="do not try to load the model")
    init.set_defaults(run=_init)
    schema = commands.add_parser("schema", help="print the JSON schema of params.yaml for editors")
    schema.add_argument("--recipe", action="store_true", help="of recipes that extend another")
    schema.add_argument("--write", action="store_true", help="write both to docs/ instead")
    schema.set_defaults(run=_schema)
    advise = commands.add_parser("advise", help="propose an arm from a finished profile")
    advise.add_argument("file", type=Path, nargs="?", default=Path("params.yaml"))
    advise.set_defaults(run=_advise)
    deps = commands.add_parser("dvc-deps", help="compare dvc.yaml's code dependencies with imports")
    deps.add_argument("--write", action="store_true", help="write them")
    deps.set_defaults(run=_dvc_deps)
    lineage = commands.add_parser("lineage", help="trace an artifact back to its inputs")
    lineage.add_argument(
        "path", type=Path, nargs="?", help="an artifact; default: record in MLflow"
    )
    lineage.add_argument("--find", metavar="ID", help="a rollout or prompt of the rounds behind it")
    lineage.add_argument("--svg", type=Path, metavar="FILE", help="draw the graph instead")
    lineage.set_defaults(run=_lineage)
    report = commands.add_parser("report", help="draw artifacts/report/index.html again")
    report.set_defaults(run=_report)
    load = commands.add_parser("load", help="write a registered policy into a directory")
    load.add_argument("address", help="models:/NAME@champion or models:/NAME/VERSION")
    load.add_argument("directory", type=Path)
    load.set_defaults(run=_load)
    sample = commands.add_parser("sample", help="sample from a round's policy or a loaded one")
    sample.add_argument("directory", type=Path)
    sample.add_argument("prompts", nargs="+", metavar="PROMPT")
    sample.add_argument("--rollouts", type=int, default=1, help="of each prompt")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--images", type=Path, metavar="DIRECTORY", help="output of image policies")
    sample.set_defaults(run=_sample)
    export = commands.add_parser("export", help="write a policy for transformers or diffusers")
    export.add_argument("directory", type=Path, help="a round's policy or a loaded one")
    export.add_argument("out", type=Path)
    export.set_defaults(run=_export)
    summary = commands.add_parser("summary", help="print reward, cost and time of each arm")
    summary.add_argument("--json", action="store_true", help="for programs, with all numbers")
    summary.set_defaults(run=_summary)
    rollouts = commands.add_parser("rollouts", help="print rollouts of a round to read")
    rollouts.add_argument("round", metavar="ROUND")
    rollouts.add_argument("--family", help="only of prompts of this family")
    kind = rollouts.add_mutually_exclusive_group()
    kind.add_argument("--right", action="store_const", const="right", dest="kind", default="all")
    kind.add_argument("--wrong", action="store_const", const="wrong", dest="kind")
    rollouts.add_argument("--limit", type=int, default=20, help="rollouts; default: 20")
    rollouts.set_defaults(run=_rollouts)
    diff = commands.add_parser("diff", help="print what changed between two evaluated rounds")
    diff.add_argument("before", metavar="ROUND", help="a round, or base")
    diff.add_argument("after", metavar="ROUND")
    diff.set_defaults(run=_diff)
    compare = commands.add_parser("compare", help="compare finished runs in one table")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="a directory or a git revision")
    compare.set_defaults(run=_compare)
    left_out = commands.add_parser(
        "left-out", help="measure the signal of prompts that a round did not train on"
    )
    left_out.add_argument("round", metavar="ROUND")
    left_out.add_argument("--prompts", type=int, default=64, help="drawn of each kind")
    left_out.add_argument("--seed", type=int, default=0)
    left_out.set_defaults(run=_left_out)
    new = commands.add_parser("new", help="write a judge, task, ... of your own under plugins/")
    new.add_argument("kind", choices=("judge", "task", "link", "selection", "curriculum"))
    new.add_argument("name", metavar="NAME")
    new.set_defaults(run=_new)
    upload = commands.add_parser("upload", help="store a model's or a policy's directory in S3")
    upload.add_argument("directory", type=Path)
    upload.add_argument("uri", metavar="s3://BUCKET/PREFIX")
    upload.set_defaults(run=_upload)
    return parser


# Each command imports what it needs: `--help` must not wait for torch, MLflow or matplotlib.


def _check(arguments: argparse.Namespace) -> int:
    from grpo.objective.rules import Severity
    from grpo.params.parameters import naming, read_params
    from grpo.sampling.evaluation import remark_on_prompts
    from grpo.wiring.checks import findings, remarks_on_revisions

    with naming(arguments.file):
        params = read_params(arguments.file)
        found = findings(params)
    errors = sum(each.severity is Severity.ERROR for each in found)
    remarks = [remark_on_prompts(params), *remarks_on_revisions(params)]
    said = [*map(str, found), *(f"WARN {each}" for each in remarks if each)]
    for each in said:
        print(f"{arguments.file}: {each}")
    if not errors:
        # Imported here: the classes of models take seconds.
        from grpo.wiring.stage_memory import require_memory

        with naming(arguments.file):
            require_memory(params, show=print)
    print(f"{arguments.file}: {errors} errors, {len(said) - errors} remarks", file=sys.stderr)
    return EXIT_WRONG_INPUT if errors else 0


def _params(arguments: argparse.Namespace) -> int:
    from grpo.params.parameters import read_params
    from grpo.params.recipes import resolved_text
    from grpo.runtime.artifacts.files import WORK, write_bytes
    from grpo.schema import PARAMS

    read_params(arguments.file)  # a wrong recipe leaves params.yaml as it is
    text = resolved_text(arguments.file)
    if arguments.write:
        said, new = f"{PARAMS}: the parameters of {arguments.file}", text.encode()
        if PARAMS.exists() and (old := PARAMS.read_bytes()) != new:
            replaced = WORK / f"replaced-{PARAMS.name}"
            write_bytes(replaced, old)
            said += f"; {replaced} holds those that it had"
        write_bytes(PARAMS, new)
        print(said, file=sys.stderr)
    else:
        print(text, end="")
    return 0


def _init(arguments: argparse.Namespace) -> int:
    from grpo.wiring.own_model import write_recipe

    recipe, model = arguments.recipe, arguments.model
    if not recipe.suffix:
        recipe = Path("recipes") / f"{recipe}.yaml"
    out = arguments.out or Path(f"{model.name}.yaml")
    write_recipe(recipe, model, out, loads_model=not arguments.no_load)
    print(out)
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    from grpo.params.recipes import RECIPE_SCHEMA, SCHEMA
    from grpo.runtime.artifacts.files import write_bytes
    from grpo.wiring.json_schema import params_schema, recipe_schema

    made = {SCHEMA: params_schema, RECIPE_SCHEMA: recipe_schema}
    if not arguments.write:
        made = {name: each for name, each in made.items() if (name != SCHEMA) == arguments.recipe}
    for name, make in made.items():
        text = json.dumps(make(), indent=1, ensure_ascii=False)
        if arguments.write:
            write_bytes(Path(name), f"{text}\n".encode())
        print(name if arguments.write else text)
    return 0


def _advise(arguments: argparse.Namespace) -> int:
    from grpo.advice.text import advise
    from grpo.params.parameters import naming, read_params

    with naming(arguments.file):
        print(advise(ARTIFACTS, read_params(arguments.file), arguments.file))
    return 0


def _dvc_deps(arguments: argparse.Namespace) -> int:
    from grpo.lineage.code_dependencies import PIPELINE, with_code_dependencies
    from grpo.runtime.artifacts.files import write_bytes

    path = Path(PIPELINE)
    wanted = with_code_dependencies(Path()).encode()
    if wanted == path.read_bytes():
        print(f"{path}: the code dependencies are those that the stages import", file=sys.stderr)
        return 0
    if not arguments.write:
        print(f"{path}: code dependencies differ from imports; add --write", file=sys.stderr)
        return EXIT_WRONG_INPUT
    write_bytes(path, wanted)
    print(path)
    return 0


def _lineage(arguments: argparse.Namespace) -> int:
    from grpo.lineage.graph import draw_svg
    from grpo.lineage.trace import format_tree, trace
    from grpo.runtime.artifacts.files import named_output

    if arguments.path is None:
        from grpo.lineage.record import record

        recorded = record(Path())
        print(f"{len(recorded.runs)} stages in MLflow, {len(recorded.new)} of them new")
        return 0
    root = trace(arguments.path)
    if arguments.find:
        from grpo.lineage.found import find_rollouts

        for each in find_rollouts(root, arguments.find):
            print(each)
        return 0
    if arguments.svg:
        with named_output(arguments.svg) as drawing:
            drawing.write_text(draw_svg(root), encoding="utf-8")
        print(arguments.svg)
    else:
        print(format_tree(root))
    return 0


def _load(arguments: argparse.Namespace) -> int:
    from grpo.registry.weights import load_version

    number = load_version(arguments.address, arguments.directory)
    print(f"{arguments.directory}: version {number}")
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    from grpo.registry.sample import draw_from
    from grpo.runtime.artifacts.files import named_output, require_replaceable, write_bytes
    from grpo.runtime.artifacts.media import encode_png

    if arguments.images:
        require_replaceable(arguments.images)  # checked before the slow load of the policy
    drawn = draw_from(
        arguments.directory, arguments.prompts, rollouts=arguments.rollouts, seed=arguments.seed
    )
    said = list(drawn.table["text"])
    if arguments.images and drawn.media is not None:
        with named_output(arguments.images) as folder:
            for row, image in enumerate(drawn.media):
                write_bytes(folder / f"{row}.png", encode_png(image.numpy()))
                said[row] = arguments.images / f"{row}.png"
    groups = drawn.table["group"].tolist()
    for row in sorted(range(len(groups)), key=groups.__getitem__):
        print(f"{arguments.prompts[groups[row]]}\t{said[row]}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from grpo.registry.export import export_policy

    export_policy(arguments.directory, arguments.out)
    print(arguments.out)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from grpo.report.page import redraw_page
    from grpo.runtime.artifacts.marks import PAGE, is_colored, say

    ran = redraw_page(ARTIFACTS)
    banners = [*ran.banners, *ran.stamps]
    print(say(banners, is_colored=is_colored(sys.stderr)), end="", file=sys.stderr)
    print(PAGE.resolve())
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from grpo.report.runs import describe_comparison, read_compared_run

    print(describe_comparison([read_compared_run(each) for each in arguments.runs]))
    return 0


def _summary(arguments: argparse.Namespace) -> int:
    from grpo.report.learned import find_empty_results
    from grpo.report.provenance import find_completed_run, state_of_page
    from grpo.report.summary import describe, summarize
    from grpo.report.terminal import wrap
    from grpo.runtime.artifacts.marks import is_colored, say

    ran, page = find_completed_run(), state_of_page()
    banners = [*ran.banners, *ran.stamps, *([page] if page else [])]
    if arguments.json:
        banners += find_empty_results(ARTIFACTS, ran.params)
        content = describe(ARTIFACTS, ran.params)
        content["warnings"] = [f"{each.title}: {each.text}" for each in banners]
        print(json.dumps(content, indent=2))
        return 0
    colored = is_colored(sys.stdout)
    print(wrap(say(banners, is_colored=colored)), end="")  # first: the results may be missing
    print(wrap(say(find_empty_results(ARTIFACTS, ran.params), is_colored=colored)), end="")
    print(summarize(ARTIFACTS, ran.params))
    return 0


def _rollouts(arguments: argparse.Namespace) -> int:
    from grpo.params.parameters import read_params
    from grpo.report.listing import list_rollouts
    from grpo.report.terminal import show

    chosen = {"family": arguments.family, "kind": arguments.kind, "limit": max(0, arguments.limit)}
    show(list_rollouts(ARTIFACTS, read_params(), arguments.round, **chosen))
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from grpo.report.changes import compare_rounds
    from grpo.report.terminal import show

    show(compare_rounds(ARTIFACTS, arguments.before, arguments.after))
    return 0


def _left_out(arguments: argparse.Namespace) -> int:
    from grpo.advice.left_out import compare_left_out
    from grpo.params.parameters import read_params

    chosen = {"prompts": arguments.prompts, "seed": arguments.seed}
    print(compare_left_out(ARTIFACTS, read_params(), arguments.round, **chosen))
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from grpo.wiring.new_parts import describe_use, write_part

    for file in write_part(arguments.kind, arguments.name):
        print(file)
    print(
        f"name it in params.yaml: {describe_use(arguments.kind, arguments.name)}", file=sys.stderr
    )
    return 0


def _upload(arguments: argparse.Namespace) -> int:
    from grpo.runtime.storage.upload import upload_directory

    sha256 = upload_directory(arguments.directory, arguments.uri)
    print(f'{{source: s3, uri: "{arguments.uri}", sha256: {sha256}}}')
    return 0


if __name__ == "__main__":
    main()
