"""Tasks from parameters."""

from pathlib import Path, PurePosixPath

from grpo.errors import ParameterError
from grpo.modalities.denoising.modality import FlowWarmup
from grpo.params.parameters import Parameters
from grpo.runtime.seeds import derive_seed
from grpo.runtime.sources import download
from grpo.schema import PARAMS
from grpo.tasks.base import PromptTables
from grpo.tasks.jsonl import read_prompts
from grpo.tasks.parameters import GlyphsTask, JsonlTask


def build_prompts(params: Parameters, data: Path) -> PromptTables:
    """Returns the prompts of the task, and the warm-up's solutions if the base is fresh."""
    task, warmup = params.task, params.policy.warmup
    if task.kind == "jsonl":
        return _read_prompts(task, params, data)
    seed = derive_seed(params.seed, "prompts") % 2**31
    if task.kind == "manipulation":
        # Imported here: what makes a task is not needed by others.
        from grpo.modalities.action_chunks import scenes

        return scenes.make_prompts(
            families=task.families,
            train_prompts=task.train_prompts,
            eval_prompts=task.eval_prompts,
            demonstrations=warmup.demonstrations,
            seed=seed,
        )
    if task.kind == "glyphs":
        return _glyphs(task, warmup, seed)
    # Imported here, as above.
    from grpo.tasks.reasoning import Solutions, make_prompts

    return make_prompts(
        families=task.families,
        notation=task.notation,
        instruction=task.instruction,
        train_prompts=task.train_prompts,
        eval_prompts=task.eval_prompts,
        warmup_prompts=warmup.prompts if warmup else 0,
        solutions=Solutions(
            answer_mark=warmup.answer_mark if warmup else "",
            worked_fraction=warmup.worked_fraction if warmup else 0.0,
            wrong_fraction=warmup.wrong_fraction if warmup else 0.0,
        ),
        seed=seed,
    )


def _read_prompts(task: JsonlTask, params: Parameters, data: Path) -> PromptTables:
    """Returns the prompts of two files, whose folder names the family of lines that name none."""
    if params.policy.warmup:
        warm = params.modality.tasks[0]
        raise ParameterError(
            f"{PARAMS}: policy.base.source scratch needs task.kind {warm}, whose "
            "solutions it is warmed up on; set another source"
        )
    folder, name = data, data.name
    if task.directory is not None:
        folder = download(task.directory, parameter="task.directory")
        name = task.directory.uri.rstrip("/").rpartition("/")[2]
    return read_prompts(
        train=folder / task.train,
        evaluation=folder / task.eval,
        instruction=task.instruction,
        family=PurePosixPath(task.train).parent.name or name,
        columns={str(field): name for field, name in task.columns.items()},
        takes_messages=params.modality.takes_messages(params.policy),
    )


def _glyphs(task: GlyphsTask, warmup: FlowWarmup | None, seed: int) -> PromptTables:
    """Returns texts to be drawn."""
    # Imported here: pillow is not needed by other tasks.
    from grpo.tasks import glyphs

    return glyphs.make_prompts(
        families=task.families,
        train_prompts=task.train_prompts,
        eval_prompts=task.eval_prompts,
        warmup_prompts=_divide(warmup, task) if warmup else {},
        wrong_fraction=warmup.wrong_fraction if warmup else 0.0,
        seed=seed,
        pixels_per_frame=task.pixels_per_frame,
    )


def _divide(warmup: FlowWarmup, task: GlyphsTask) -> dict[str, int]:
    """Returns the warm-up's prompts of each family.

    Raises:
      ParameterError: If the shares are not those of the task's families.
    """
    if warmup.shares.keys() != task.families.keys():
        raise ParameterError(
            f"{PARAMS}: policy.base.warmup.shares must name the families of the task, "
            f"{sorted(task.families)}, got {sorted(warmup.shares)}"
        )
    total = sum(warmup.shares.values())
    return {name: round(warmup.prompts * each / total) for name, each in warmup.shares.items()}
