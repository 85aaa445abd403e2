"""Typed parameters of tasks: which prompts there are."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from grpo.schema import DataPath, Name, Positive, S3Base, Strict

Text = Annotated[str, Field(min_length=1)]


class ReasoningGymTask(Strict):
    """Procedural tasks of reasoning-gym; prompts of train and eval are disjoint as text."""

    kind: Literal["reasoning_gym"]
    notation: Literal["compact", "question"]  # short forms for small models, or the full question
    train_prompts: Positive
    eval_prompts: Positive
    instruction: str  # appended to every prompt
    families: dict[str, dict[str, Any]] = Field(min_length=1)  # reasoning-gym name -> difficulty


class JsonlTask(Strict):
    """Prompts and answers from two files: JSON lines, a JSON array or a parquet table."""

    kind: Literal["jsonl"]
    directory: S3Base | None  # where the files lie; null: data/
    train: DataPath
    eval: DataPath
    columns: dict[Literal["prompt", "answer", "family"], Text]  # what the files call them otherwise
    instruction: str  # appended to every prompt

    @field_validator("columns")
    @classmethod
    def _divides_prompt_and_answer(cls, columns: dict[str, str]) -> dict[str, str]:
        if columns.get("prompt", "prompt") == columns.get("answer", "answer"):
            raise ValueError("must name different columns for prompt and answer")
        return columns


class GlyphsTask(Strict):
    """Short texts to be drawn; prompts of train and eval are disjoint, and not in the warm-up."""

    kind: Literal["glyphs"]
    train_prompts: Positive
    eval_prompts: Positive
    families: dict[Name, list[Text]] = Field(min_length=1)
    # family -> the characters that may stand at each place; of clips the last is an arrow: > < v ^
    pixels_per_frame: Positive | None  # of what moves, in clips; null: images


class ManipulationTask(Strict):
    """Scenes of Meta-World: a robot arm, told what to do; scenes of train and eval differ."""

    kind: Literal["manipulation"]
    train_prompts: Positive
    eval_prompts: Positive
    families: list[Name] = Field(min_length=1)  # environments, e.g. push-v3


Task = Annotated[
    ReasoningGymTask | JsonlTask | GlyphsTask | ManipulationTask, Field(discriminator="kind")
]
