"""Scenes of a robot arm: initial states of Meta-World's families."""

import json
from collections.abc import Mapping
from typing import Literal

import pandas as pd
from pydantic import Field

from grpo.runtime.seeds import derive_seed
from grpo.schema import Name, Positive
from grpo.tasks.base import PromptTables, Task, TaskInputs, shares


class ManipulationTask(Task):
    """Scenes of Meta-World's robot arm with an instruction; train and eval are disjoint."""

    prompt_kinds = ("scene",)

    kind: Literal["manipulation"]
    train_prompts: Positive
    eval_prompts: Positive
    families: list[Name] = Field(min_length=1)  # environments, e.g. push-v3

    def make_prompts(self, inputs: TaskInputs) -> PromptTables:
        return make_prompts(
            families=self.families,
            train_prompts=self.train_prompts,
            eval_prompts=self.eval_prompts,
            demonstrations=inputs.warmup.demonstrations,
            seed=inputs.seed,
        )


def make_prompts(
    *,
    families: list[str],
    train_prompts: int,
    eval_prompts: int,
    demonstrations: Mapping[str, int],
    seed: int,
) -> PromptTables:
    """Returns distinct scenes of every family in equal shares.

    The solution of a warm-up scene is the seed of the noise in its demonstration.

    Args:
      demonstrations: Number per family; the default is 0.

    Raises:
      ParameterError: If Meta-World has no such family.
    """
    # Imported here: an extra, needed only to draw scenes.
    from grpo.modalities.action_chunks.simulation.metaworld import require_families

    require_families(families)
    parts: dict[str, list[dict[str, str]]] = {"train": [], "eval": [], "warmup": []}
    for index, family in enumerate(families):
        counts = {
            "train": shares(train_prompts, len(families))[index],
            "eval": shares(eval_prompts, len(families))[index],
            "warmup": demonstrations.get(family, 0),
        }
        scenes = _draw_distinct(family, sum(counts.values()), seed)
        for part, count in counts.items():
            taken, scenes = scenes[:count], scenes[count:]
            parts[part] += [
                {"prompt_id": f"{part}-{family}-{number:05d}", "family": family, "prompt": scene}
                for number, scene in enumerate(taken)
            ]
    warmup = pd.DataFrame(parts["warmup"], columns=["prompt_id", "family", "prompt"])
    solution = [str(derive_seed(seed, each) % 2**31) for each in warmup["prompt_id"]]
    return PromptTables(
        train=_prompt_frame(parts["train"]),
        eval=_prompt_frame(parts["eval"]),
        warmup=warmup.assign(solution=solution),
    )


def _draw_distinct(family: str, count: int, seed: int) -> list[str]:
    """Returns distinct scenes of a family."""
    from grpo.modalities.action_chunks.simulation.metaworld import draw_scene, make_environment

    environment, scenes, number = make_environment(family), dict[str, None](), 0
    while len(scenes) < count:
        scenes[draw_scene(environment, family, derive_seed(seed, family, number))] = None
        number += 1
    return list(scenes)


def _prompt_frame(rows: list[dict[str, str]]) -> pd.DataFrame:
    """Returns a table of schema PROMPTS; the answer is empty because the scene holds the goal."""
    return pd.DataFrame(rows).assign(answer="", entry=json.dumps({}))
