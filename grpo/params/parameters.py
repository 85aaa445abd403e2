"""Typed parameters: the only reader of params.yaml.

All parameters are required but those with the default None, which are methods that are not used.
"""

import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import (
    Field,
    PlainValidator,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from grpo.errors import ParameterError, brief, located
from grpo.modalities import MODALITIES, find_modality
from grpo.modalities.modality import Modality, PolicyParams, SamplingParams
from grpo.params.recipes import read_content
from grpo.params.yaml import value_at
from grpo.rewards import find_judge, judge_names
from grpo.runtime.plugins import PLUGINS, call_plugin, import_plugin, is_plugin
from grpo.schema import (
    PARAMS,
    WITHHELD,
    Decay,
    DirectoryBase,
    Fraction,
    HubBase,
    Machine,
    Name,
    NonNegative,
    Normalization,
    Positive,
    Processes,
    Rate,
    Rollouts,
    S3Base,
    Strict,
    Timeout,
    Updates,
    WithOptionalKeys,
    require_one_group,
)
from grpo.tasks import find_task, task_kinds
from grpo.tasks.base import Task

JudgeModel = Annotated[DirectoryBase | HubBase | S3Base, Field(discriminator="source")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
LARGEST_SIZE = 2**24  # of a fresh model's widths, vocabulary and context
MOST_LAYERS = 4096  # of a fresh model; the deepest in use have hundreds
LAYERS = ("num_hidden_layers", "num_layers")
WIDTHS = ("hidden_size", "d_model", "joint_attention_dim")
OTHER_WIDTHS = ("vocab_size", "intermediate_size", "d_ff")
HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "attention_head_dim")
MODEL_BYTES = 2**40  # of a fresh model's weights in float32; exceeds the memory of one machine
LONGEST_NAME = 80  # in a message
PAIRS = ("betas", "window", "fallback", "score_range", "patch_size")
BASE = "base"  # the name of the base policy, from which every chain of rounds starts
Purpose = Literal["outcome", "reward", "evaluation"]  # of judging
LinkSpec = str | dict[str, dict[str, int | float | str | bool]]  # "rloo" or {rloo: {low: 0.2}}
Info = Any  # pydantic's ValidationInfo, a protocol that beartype cannot check
# policy.kind of the parameters that are being validated. It selects the type of the sections
# `sampling` of arms and of the evaluation, which are validated after `policy`.
_KIND: ContextVar[str | None] = ContextVar("policy.kind", default=None)
RULES = {  # by pydantic's error type
    "missing": "is missing",
    "union_tag_not_found": "is missing",
    "union_tag_invalid": "must be one of {expected_tags}",
    "extra_forbidden": "is unknown",
    "less_than_equal": "must be at most {le}",
    "greater_than_equal": "must be at least {ge}",
    "too_short": "must have at least {min_length} item",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must have at least {min_length} character",
}
KINDS = {  # by pydantic's type name
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "dict": "a mapping",
    "model": "a mapping",
    "list": "a list",
    "tuple": "a list",
}
Component = TypeVar("Component")
SETTING_KINDS = {int: "an integer", float: "a number", str: "a text"}


def _find_settings(value: Any, info: Info) -> Any:
    """Returns a judge's `settings` as the judge's own type; unchanged if its name is invalid."""
    name = info.data.get("judge")
    if value is None or name is None:
        return value
    kind = find_judge(name).settings
    if kind is None:
        raise ValueError(f"must be removed: the judge {name} has none")
    return _validate(kind, value, info)


class JudgeParams(WithOptionalKeys):
    """A judge; a model or range that it does not use is null."""

    @field_validator("judge")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if is_plugin(name):
            find_judge(name)
        elif name not in judge_names():
            *first, last = (f"'{each}'" for each in judge_names())
            expected = f"{', '.join(first)} or {last}"
            raise PydanticCustomError(
                "literal_error", "Input should be {expected}", {"expected": expected}
            )
        return name

    @field_validator("score_range")
    @classmethod
    def _rises(cls, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        if ends is not None and ends[0] >= ends[1]:
            raise ValueError("must rise from its first number to its second")
        if ends is not None and not math.isfinite(ends[1] - ends[0]):
            raise ValueError("must be of a finite width")
        return ends

    judge: str  # the name of a file in grpo/rewards/, or a dotted path under plugins/
    model: JudgeModel | None  # of judges that need one
    score_range: tuple[Finite, Finite] | None  # raw scores that map to 0 and to 1; null: 0, 1
    # Of judges that have settings of their own, such as the server that they ask.
    settings: Annotated[SerializeAsAny[Strict] | None, PlainValidator(_find_settings)] = None


class WeightedJudge(JudgeParams):
    """A judge and its part in the reward."""

    weight: NonNegative
    normalize: Normalization  # of its scores, within the rollouts of a prompt


class OverlongPenalty(Strict):
    """DAPO's soft penalty, which rises from 0 to `penalty` over the last steps before a limit."""

    @model_validator(mode="after")
    def _fits(self) -> "OverlongPenalty":
        if self.buffer_steps > self.max_steps:
            raise ValueError("must have at most as many buffer_steps as max_steps")
        return self

    max_steps: Positive  # from here on the penalty is whole
    buffer_steps: Positive  # before max_steps, in which the penalty rises
    penalty: Rate  # in units of reward


class Reward(WithOptionalKeys):
    """The judges and what is made of their scores."""

    @field_validator("judges")
    @classmethod
    def _differ(cls, judges: list[WeightedJudge]) -> list[WeightedJudge]:
        if not any(each.weight for each in judges):
            raise ValueError("must have a weight above 0")
        _require_distinct(judges)
        return judges

    @field_validator("answer_pattern")
    @classmethod
    def _has_one_group(cls, pattern: str | None) -> str | None:
        return None if pattern is None else require_one_group(pattern, "the answer")

    judges: list[WeightedJudge] = Field(min_length=1)  # the first decides the outcome
    answer_pattern: str | None  # of judges of text: group 1 of its last match is the answer
    threshold: Fraction  # the outcome is 1 if the first judge's score is at least this
    maximize: Literal["outcome", "score"]  # what the first judge adds to the reward
    unfinished_penalty: NonNegative  # subtracted if a rollout hit the step limit
    # Of judges of text, per rollout and judge. With a reward function it may be null: no limit.
    timeout_seconds: Timeout | None
    overlong_penalty: OverlongPenalty | None = None  # subtracted from the reward of long rollouts
    memory_gb: Rate | None = None  # of the process of each judge of text; null: 4


def _require_distinct(judges: Sequence[JudgeParams]) -> None:
    """Raises ValueError unless the names of judges, which name columns, differ."""
    names = [each.judge for each in judges]
    repeated = [each for each in names if names.count(each) > 1]
    if repeated:
        raise ValueError(f"must name each judge once, {repeated[0]} is there twice")


def _check_judges(params: "Parameters", path: Path) -> None:
    """Raises ParameterError unless all judges fit the task and the policy, and their settings.

    Args:
      path: Path of the parameter file, for the message.
    """
    judges = params.judges("evaluation")
    scored = {each.judge for each in params.reward.judges}
    for index, each in enumerate(params.evaluation.judges):
        if each.judge in scored:
            raise ParameterError(
                f"{path}: evaluation.judges[{index}] must not repeat a judge of the reward, got "
                f"{each.judge!r}; remove it: its scores are reported anyway"
            )
    asked = {where: find_judge(each.judge) for where, each in judges.items()}
    for where, each in judges.items():
        _check_judge(each, f"{path}: {where}")
        needed = asked[where].needs_task
        if needed not in (None, params.task.kind):
            raise ParameterError(
                f"{path}: {where}.judge {each.judge} needs task.kind {needed}, "
                f"got {params.task.kind!r}; set the judge to math or your own"
            )
        for name, wanted in asked[where].task_settings.items():
            if (found := getattr(params.task, name)) != wanted:
                raise ParameterError(
                    f"{path}: {where}.judge {each.judge} needs task.{name} {wanted}, got {found!r}"
                )
    of_parts = [each for each in params.reward.judges if find_judge(each.judge).scores_parts]
    if len(of_parts) > 1:
        raise ParameterError(
            f"{path}: reward.judges must have at most one judge that scores parts, got "
            f"{of_parts[0].judge} and {of_parts[1].judge}; remove one"
        )
    has_answer = any(each.reads == "text" and not each.reads_together for each in asked.values())
    may_fork = any(each.may_fork for each in asked.values())
    names = ", ".join(each.judge for each in judges.values())
    for name in ("answer_pattern", "timeout_seconds"):
        value = getattr(params.reward, name)
        is_optional = name == "timeout_seconds" and may_fork and not has_answer
        if has_answer == (value is None) and not is_optional:
            rule = "must be stated" if has_answer else "must be null"
            raise ParameterError(f"{path}: reward.{name} {rule} with judge {names}, got {value!r}")
    has_process = has_answer or (may_fork and params.reward.timeout_seconds is not None)
    if params.reward.memory_gb is not None and not has_process:
        raise ParameterError(
            f"{path}: reward.memory_gb must be removed with judge {names}: it is of judges of text "
            "in a process of their own"
        )


def _check_judge(each: JudgeParams, where: str) -> None:
    """Raises ParameterError unless the settings that a judge needs are set and others null."""
    judge = find_judge(each.judge)
    if judge.settings is not None and each.settings is None:
        raise ParameterError(f"{where}.settings is missing, judge {each.judge} needs it")
    needs = {"model": judge.needs_model}
    if judge.needs_model or judge.reads == "simulation":  # optional for other judges
        needs["score_range"] = judge.needs_model
    for name, needed in needs.items():
        value = each.model_dump()[name]
        if needed == (value is None):
            rule = "must be stated" if needed else "must be null"
            raise ParameterError(f"{where}.{name} {rule} with judge {each.judge}, got {value!r}")


def _find_policy(value: Any, info: Info) -> PolicyParams:
    """Returns the section `policy` as the type of its modality."""
    _KIND.set(None)
    found: PolicyParams = _by_kind(
        value, info, tuple(MODALITIES), lambda kind: find_modality(kind).policy
    )
    _KIND.set(found.kind)
    return found


def _find_task(value: Any, info: Info) -> Task:
    found: Task = _by_kind(value, info, task_kinds(), find_task)
    return found


def _find_sampling(value: Any, info: Info) -> Any:
    """Returns an arm's `sampling` as the modality has it; unchanged if `policy` is invalid."""
    kind = _KIND.get()
    return _validate(find_modality(kind).sampling, value, info) if kind else value


def _find_draws(value: Any, info: Info) -> Any:
    """Returns the evaluation's `sampling` by the same rule."""
    kind = _KIND.get()
    return _validate(find_modality(kind).evaluation_sampling, value, info) if kind else value


def _by_kind(
    value: Any, info: Info, kinds: Sequence[str], find: Callable[[str], type[Strict]]
) -> Any:
    """Returns a section as the type of its `kind`; the other types are not imported."""
    if isinstance(value, dict) and (value.get("kind") in kinds or is_plugin(value.get("kind"))):
        return _validate(find(value["kind"]), value, info)
    union: Any = Union[tuple(find(each) for each in kinds)]  # noqa: UP007  of variable length
    return _validate(Annotated[union, Field(discriminator="kind")], value, info)  # raises


def _validate(kind: Any, value: Any, info: Info) -> Any:
    if isinstance(value, Strict):
        return value
    if info.mode == "json":
        return TypeAdapter(kind).validate_json(json.dumps(value))
    return TypeAdapter(kind).validate_python(value)


class _Profile(Strict):
    """How the difficulty of prompts is measured: by rollouts of the base policy."""

    when: Literal["read", "always"]  # read: only if an arm's curriculum or selection reads it
    rollouts_per_prompt: Rollouts
    rollouts_per_batch: Positive  # sampled together


class ConstantRate(Strict):
    """The learning rate rises from 0 during the warm-up and then stays."""

    kind: Literal["constant"]
    warmup_updates: Updates


class DecayingRate(Strict):
    """The learning rate rises from 0 during the warm-up and then decays to 0."""

    @model_validator(mode="after")
    def _decays(self) -> "DecayingRate":
        if self.warmup_updates >= self.total_updates:
            raise ValueError("must have more total_updates than warmup_updates")
        return self

    kind: Literal["linear", "cosine"]
    warmup_updates: Updates
    total_updates: Positive  # of all rounds from the base to the arm's last one


class StopOnPlateau(Strict):
    """A round ends when the mean reward of N iterations is not above that of the N before."""

    iterations: Positive  # N, of each of the two means
    tolerance: NonNegative  # in units of reward; a smaller rise counts as none


class Training(WithOptionalKeys):
    """Iterations, updates and the optimizer of an arm's rounds."""

    @model_validator(mode="after")
    def _can_stop(self) -> "Training":
        stop = self.stop_on_plateau
        if stop is not None and 2 * stop.iterations >= self.iterations_per_round:
            raise ValueError(
                "must have more iterations_per_round than two times stop_on_plateau.iterations"
            )
        return self

    iterations_per_round: Positive  # each samples with the policy as it is then
    updates_per_iteration: Positive  # optimizer steps of a pass, each on a part of the groups
    staleness: Literal[0, 1]  # iterations between the weights that sample and those that train
    # What is kept of the rollouts that later iterations than the first have sampled.
    stored_rollouts: Literal["all", "without_media", "tables"]
    learning_rate: Rate
    betas: tuple[Decay, Decay]  # of AdamW
    weight_decay: NonNegative  # of AdamW
    max_grad_norm: Rate  # larger gradients are scaled down to it
    tokens_per_microbatch: Positive  # rows times width of one forward pass
    updates_per_checkpoint: Positive  # a killed round continues from the last one
    updates_per_audit: Annotated[int, Field(ge=0)]  # 0: never; an audit computes the full gradient
    ranks: Processes  # data-parallel processes; changes the order of sums, and so the last bits
    # Of the learning rate, over the updates since the base policy; null: it is constant.
    schedule: Annotated[ConstantRate | DecayingRate, Field(discriminator="kind")] | None = None
    # The policy whose log-probs penalties compare with: the base (null, too), or the policy that
    # the round starts from.
    reference: Literal["base", "round_start"] | None = None
    stop_on_plateau: StopOnPlateau | None = None  # null: every iteration of a round runs
    # Passes over the rollouts of an iteration, all in the same batches; TRL's num_iterations.
    passes_per_iteration: Positive = 1

    @property
    def optimizer_steps_per_iteration(self) -> int:
        """The updates of all passes of an iteration."""
        return self.passes_per_iteration * self.updates_per_iteration

    @property
    def refreshes_reference(self) -> bool:
        """Whether every round has its own reference."""
        return self.reference == "round_start"


class Arm(Strict):
    """One way to spend compute: which prompts and group sizes, how to sample and to train."""

    curriculum: list[LinkSpec] = Field(min_length=1)  # steps: prompts, group sizes and phases
    selection: list[LinkSpec]  # prompts that are sampled; empty: every prompt of a phase
    sampling: Annotated[SerializeAsAny[SamplingParams], PlainValidator(_find_sampling)]
    objective: list[LinkSpec] = Field(min_length=1)  # links, or the name of an algorithm
    training: Training


class RoundParams(Strict):
    """A round of an arm, which starts from the base policy or from another round."""

    arm: Name  # a name of the section arms
    start: Name  # base, or the name of a round above this one
    phase: Positive  # of the arm's curriculum, from 1


class _Evaluation(Strict):
    """How the base policy and every arm's rounds are evaluated on the prompts for evaluation."""

    @field_validator("judges")
    @classmethod
    def _differ(cls, judges: list[JudgeParams]) -> list[JudgeParams]:
        _require_distinct(judges)
        return judges

    judges: list[JudgeParams]  # beside those of the reward; their scores are only reported
    sampling: Annotated[SerializeAsAny[Strict], PlainValidator(_find_draws)]
    rollouts_per_prompt: Annotated[int, Field(ge=2, le=65536)]
    rollouts_per_batch: Positive  # sampled together
    confidence: Annotated[float, Field(gt=0, lt=1)]  # of the intervals, such as 0.95
    bootstrap_resamples: Annotated[int, Field(gt=0, le=10**6)]  # of 1,000 prompts: 8 GB


class _ExecutorParams(Strict):
    """Workers that sample and judge. Results do not depend on them, so that no stage reruns."""

    executor: Literal["local", "processes", "ray"]  # in the stage, on this host, or on a cluster
    workers: Processes  # 1 with the executor local

    @field_validator("executor", mode="before")
    @classmethod
    def _is_no_sampler(cls, value: Any) -> Any:
        if value == "vllm":
            raise ValueError("must be local, processes or ray; vllm is a policy.sampler")
        return value


class Parameters(Strict):
    """One run: its task, base policy, reward and evaluation, and how each arm spends compute."""

    seed: Annotated[int, Field(ge=0)]  # all random numbers of the run follow from it
    machine: Machine
    sampling: _ExecutorParams
    task: Annotated[SerializeAsAny[Task], PlainValidator(_find_task)]  # the source of prompts
    # The model: its kind, where the base comes from, adapters and the limit of steps.
    policy: Annotated[SerializeAsAny[PolicyParams], PlainValidator(_find_policy)]
    profile: _Profile
    reward: Reward
    evaluation: _Evaluation
    arms: dict[Name, Arm] = Field(min_length=1)  # by name; the report compares with the first
    rounds: dict[Name, RoundParams] = Field(min_length=1)  # by name; each arm's are one chain

    @property
    def modality(self) -> Modality[Any, Any, Any]:
        """The modality of the policy."""
        return find_modality(self.policy.kind)

    def judges(self, purpose: Purpose) -> dict[str, JudgeParams]:
        """Returns the judges that are asked for a purpose by the path of their parameters."""
        lists: dict[str, Sequence[JudgeParams]] = {"reward.judges": self.reward.judges}
        if purpose == "outcome":
            lists = {"reward.judges": self.reward.judges[:1]}
        elif purpose == "evaluation":
            lists["evaluation.judges"] = self.evaluation.judges
        return {
            f"{where}[{index}]": each
            for where, judges in lists.items()
            for index, each in enumerate(judges)
        }

    def rounds_of(self, arm: str) -> list[str]:
        """Returns the names of an arm's rounds, in the file's order."""
        return [name for name, each in self.rounds.items() if each.arm == arm]

    def chain(self, arm: str) -> list[str]:
        """Returns the policies from base to the arm's last round."""
        name, reversed_chain = self.rounds_of(arm)[-1], []
        while name != BASE:
            reversed_chain.append(name)
            name = self.rounds[name].start
        return [BASE, *reversed(reversed_chain)]

    def find_arm(self, name: str) -> Arm:
        """Returns an arm; raises ParameterError if it is missing."""
        if name not in self.arms:
            raise ParameterError(f"{PARAMS}: arms.{name} is missing, there are {sorted(self.arms)}")
        return self.arms[name]

    def find_round(self, name: str) -> RoundParams:
        """Returns a round; raises ParameterError if it is missing."""
        if name not in self.rounds:
            known = sorted(self.rounds)
            raise ParameterError(f"{PARAMS}: rounds.{name} is missing, there are {known}")
        return self.rounds[name]


def read_params(path: Path = PARAMS) -> Parameters:
    """Returns the typed content of a parameter file.

    Raises:
      ParameterError: If the file is missing or not valid YAML, or a parameter is wrong. The message
        is one line with the file, the path of the first wrong parameter, the rule and the value.
    """
    content = read_content(path)
    try:
        params = TypeAdapter(Parameters).validate_python(with_tuples(content))
    except ValidationError as error:
        raise ParameterError(f"{path}: {_explain(error, content)}") from None
    _check_rounds(params, path)
    if params.sampling.executor == "local" and params.sampling.workers > 1:
        raise ParameterError(
            f"{path}: sampling.workers must be 1 with sampling.executor local, "
            f"got {params.sampling.workers}; set the executor to processes or ray"
        )
    _check_judges(params, path)
    _check_policy(params, path)
    return params


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Replaces params.yaml by `file` in a ParameterError of the block."""
    try:
        yield
    except ParameterError as error:
        path, _, message = str(error).partition(": ")
        raise ParameterError(f"{file if path == str(PARAMS) else path}: {message}") from None


def with_tuples(value: Any) -> Any:
    """Returns `value` with pairs converted to tuples, as strict validation requires."""
    if isinstance(value, dict):
        return {
            key: tuple(item) if key in PAIRS and isinstance(item, list) else with_tuples(item)
            for key, item in value.items()
        }
    return [with_tuples(each) for each in value] if isinstance(value, list) else value


def _check_rounds(params: Parameters, path: Path) -> None:
    """Raises unless every round has a known arm and start, and each arm's rounds are one chain.

    Reports show one curve and one cost per arm.
    """
    for where, names in (("arms", params.arms), ("rounds", params.rounds)):
        if BASE in names:
            raise ParameterError(
                f"{path}: {where}.{BASE}: {BASE!r} is the base policy's name; choose another"
            )
    ancestors: dict[str, set[str]] = {BASE: set()}  # by policy
    last: dict[str, str] = {}  # the latest round by arm
    for name, each in params.rounds.items():
        where = f"{path}: rounds.{name}"
        if each.arm not in params.arms:
            raise ParameterError(
                f"{where}.arm must be one of {sorted(params.arms)}, got {each.arm!r}"
            )
        if each.start not in ancestors:
            raise ParameterError(
                f"{where}.start must be 'base' or a round above it, got {each.start!r}"
            )
        ancestors[name] = {each.start, *ancestors[each.start]}
        before = last.get(each.arm)
        if before is not None and before not in ancestors[name]:
            raise ParameterError(
                f"{where}.start must be {before!r}, the previous round of {each.arm!r}, or a "
                f"descendant of it, got {each.start!r}; use another arm for a second chain"
            )
        last[each.arm] = name


def _check_policy(params: Parameters, path: Path) -> None:
    """Raises unless task, judge and machine are compatible with the kind of policy."""
    modality, kind = params.modality, params.policy.kind
    if modality.prompt_kind not in params.task.prompt_kinds:
        fitting = [
            each for each in task_kinds() if modality.prompt_kind in find_task(each).prompt_kinds
        ]
        raise ParameterError(
            f"{path}: task.kind must be one of {fitting} with policy.kind {kind}, "
            f"got {params.task.kind!r}"
        )
    for where, each in params.judges("evaluation").items():
        if find_judge(each.judge).reads != modality.output_kind:
            fitting = [
                name for name in judge_names() if find_judge(name).reads == modality.output_kind
            ]
            raise ParameterError(
                f"{path}: {where}.judge must be one of {fitting} with policy.kind {kind}, "
                f"got {each.judge!r}"
            )
        for wrong in modality.find_conflicts(params, each.judge):
            raise ParameterError(f"{path}: {wrong}")
    _check_overlong_penalty(params, path)
    for name, arm in params.arms.items():
        for wrong in modality.find_rank_conflicts(params) if arm.training.ranks > 1 else ():
            raise ParameterError(f"{path}: with arms.{name}.training.ranks above 1, {wrong}")
    for where, config in params.policy.fresh_configs().items():
        _check_size(config, f"{path}: {where}")


def _check_overlong_penalty(params: Parameters, path: Path) -> None:
    """Raises if rollouts have no step limit, or it comes before the one of the penalty."""
    overlong, limit = params.reward.overlong_penalty, getattr(params.policy, "max_steps", None)
    where = f"{path}: reward.overlong_penalty"
    if overlong is None:
        return
    if limit is None:
        raise ParameterError(
            f"{where} needs a policy with max_steps, got policy.kind {params.policy.kind}; remove "
            "the key"
        )
    if overlong.max_steps > limit:
        raise ParameterError(
            f"{where}.max_steps must be at most {limit}, which is policy.max_steps, got "
            f"{overlong.max_steps}"
        )


def _check_size(config: Mapping[str, Any], where: str) -> None:
    """Raises if a fresh model's weights would exceed MODEL_BYTES, estimated from its matrices."""
    largest = 1
    for key, value in config.items():
        if isinstance(value, int) and abs(value) > LARGEST_SIZE:
            raise ParameterError(f"{where}.{key} must be at most {LARGEST_SIZE}, got {value}")
    for key in (*LAYERS, *WIDTHS, *OTHER_WIDTHS, *HEADS):
        value, most = config.get(key, 1), MOST_LAYERS if key in LAYERS else LARGEST_SIZE
        if isinstance(value, int) and not 0 < value <= most:
            raise ParameterError(f"{where}.{key} must be in [1, {most}], got {value}")
    for key in WIDTHS:
        width = config.get(key, 0)
        if isinstance(width, int):
            others = [config.get(each, 0) for each in OTHER_WIDTHS]
            rows = sum(each for each in others if isinstance(each, int)) + 4 * width
            layers = config.get("num_hidden_layers", config.get("num_layers", 1))
            largest = max(largest, 4 * width * rows * (layers if isinstance(layers, int) else 1))
    if largest > MODEL_BYTES:
        raise ParameterError(
            f"{where} must be of a model whose weights take at most {MODEL_BYTES / 2**40:.0f} TiB, "
            f"got about {largest / 2**40:.3g}; lower its widths or layers"
        )


def _explain(error: ValidationError, content: Mapping[str, Any]) -> str:
    """Returns the first problem as one line: path, rule, value, and a suggested spelling.

    Args:
      content: Of the file.
    """
    problems = error.errors()
    first = problems[0]
    if _is_name_form(first["loc"]):  # the problem in the mapping form of a link is more specific
        link = first["loc"][:-1]
        within = [each for each in problems if each["loc"][: len(link)] == link]
        first = max(within, key=lambda each: len(each["loc"]))
    misspelled = _find_misspelled(problems)
    if misspelled:
        wrong, meant = misspelled
        return (
            f"{_path(wrong['loc'])} is unknown, got {_format_value(wrong['input'])}; is it {meant}?"
        )
    rule = _rule(first, problems)
    path = _path(first["loc"][:-1] if _is_of_union(first) else first["loc"])
    if first["type"].startswith("union_tag"):
        path += f".{first['ctx']['discriminator'].strip(chr(39))}"
    if first["type"] == "literal_error" or first["type"] == "union_tag_invalid":
        known = re.findall("'([^']*)'", rule)
        value = first["ctx"].get("tag", first["input"])
        is_part = path.rpartition(".")[2] in ("judge", "kind")
        return f"{path} {rule}, got {_format_value(value)}{_nearest(str(value), known, is_part)}"
    if first["type"] == "extra_forbidden":
        above, _, name = path.rpartition(".")
        siblings = value_at(content, re.sub(r"\[(\d+)\]", r".\1", above)) if above else content
        known = (
            [str(each) for each in siblings if each != name] if isinstance(siblings, dict) else []
        )
        return f"{path} {rule}, got {_format_value(first['input'])}{_nearest(name, known)}"
    has_no_value = first["type"] in ("missing", "union_tag_not_found", WITHHELD)
    return (
        f"{path} {rule}" if has_no_value else f"{path} {rule}, got {_format_value(first['input'])}"
    )


def _rule(problem: ErrorDetails, problems: list[ErrorDetails]) -> str:
    """Returns the rule that is broken; for a union, with all of its types."""
    of_value = [each for each in problems if each["loc"][:-1] == problem["loc"][:-1]]
    types = [each["type"] for each in (of_value if _is_of_union(problem) else [problem])]
    kinds = [KINDS[each.partition("_type")[0]] for each in types if _is_kind(each)]
    if kinds:
        return f"must be {' or '.join(dict.fromkeys(kinds))}"
    if problem["type"] in RULES:
        return RULES[problem["type"]].format(**problem.get("ctx", {}))
    return problem["msg"].replace("Input should be", "must be").removeprefix("Value error, ")


def _is_of_union(problem: ErrorDetails) -> bool:
    """Returns whether pydantic has appended the name of a union member to the path."""
    return problem["loc"][-1:] != () and problem["loc"][-1] in ("int", "float", "str", "bool")


def _is_kind(problem: str) -> bool:
    return problem.endswith("_type") and problem.partition("_type")[0] in KINDS


def _find_misspelled(problems: list[ErrorDetails]) -> tuple[ErrorDetails, str] | None:
    """Returns an unknown key and the similar missing key, or None; all keys are required."""
    for wrong in (each for each in problems if each["type"] == "extra_forbidden"):
        *above, name = wrong["loc"]
        missing = [
            str(each["loc"][-1])
            for each in problems
            if each["type"] == "missing" and list(each["loc"][:-1]) == above
        ]
        near = difflib.get_close_matches(str(name), missing, n=1)
        if near:
            return wrong, near[0]
    return None


def _format_value(value: object) -> str:
    """Returns a value in YAML spelling, truncated."""
    spelled = {True: "true", False: "false", None: "null"}
    is_word = value is None or isinstance(value, bool)
    return spelled[value] if is_word else brief(repr(value))  # type: ignore[index]


def _is_name_form(location: tuple[int | str, ...]) -> bool:
    """Returns whether the problem is that a link is not a plain name."""
    return location[-1:] == ("str",) and isinstance(location[-2], int)


def _path(location: tuple[int | str, ...]) -> str:
    """Returns the dotted path without the names of union members, which pydantic adds."""
    members = {
        "task": {*task_kinds()},
        "policy": {*MODALITIES},
        "backbone": {"scratch", "directory", "hub", "s3"},
        "base": {"scratch", "directory", "gguf", "hub", "s3"},
        "encoder": {"scratch", "directory", "hub", "s3"},
        "model": {"directory", "hub", "s3"},
        "warmup": {"solutions", "pairs"},
        "temperature": {"number", "rising"},
        "schedule": {"constant", "linear", "cosine"},
    }
    kept = [
        part
        for before, part in zip(("", *location), location)
        if part not in members.get(str(before), ()) and not str(part).startswith(("dict[", "[key]"))
    ]
    is_link = any(isinstance(part, int) for part in kept)
    while is_link and kept[-1] in {"str", "int", "float"}:
        kept.pop()
    parts = [f"[{part}]" if isinstance(part, int) else f".{_truncate(part)}" for part in kept]
    return "".join(parts).lstrip(".") or "the file"


def _truncate(name: str) -> str:
    """Returns a name, truncated to LONGEST_NAME characters."""
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."


def build_listed(
    specs: list[LinkSpec],
    table: Mapping[str, Callable[..., Component]],
    where: str,
    kind: type[Component],
) -> list[tuple[str, Component]]:
    """Returns each component with its parameter path, e.g. arms.sgpo.objective[0].rloo.

    Args:
      table: Functions that return a component, by name; others are at dotted paths under plugins/.

    Raises:
      ParameterError: If a name or setting is unknown, missing or out of range.
    """
    return [_build(spec, table, f"{where}[{index}]", kind) for index, spec in enumerate(specs)]


def _build(
    spec: LinkSpec,
    table: Mapping[str, Callable[..., Component]],
    where: str,
    kind: type[Component],
) -> tuple[str, Component]:
    named = {spec: {}} if isinstance(spec, str) else spec
    if len(named) != 1:
        raise ParameterError(f"{PARAMS}: {where} must name one component, got {sorted(named)}")
    name, settings = next(iter(named.items()))
    if is_plugin(name):
        with located(f"{PARAMS}: {where}"):
            make = _find_function(name, kind)
    elif name in table:
        make = table[name]
    else:
        raise ParameterError(
            f"{PARAMS}: {where} must be one of {sorted(table)}, got {name!r}"
            f"{_nearest(name, table, is_part=True)}"
        )
    path = f"{where}.{name}"
    known = _parameters_of(make, path)
    for key in settings:
        if key not in known:
            raise ParameterError(
                f"{PARAMS}: {path}.{key} is unknown, must be one of {sorted(known)}"
                f"{_nearest(key, known)}"
            )
    for key, parameter in known.items():
        if key not in settings and parameter.default is parameter.empty:
            raise ParameterError(f"{PARAMS}: {path}.{key} is missing")
        _check_type(settings.get(key, parameter.default), parameter.annotation, f"{path}.{key}")
    try:
        made = call_plugin(partial(make, **settings)) if is_plugin(name) else make(**settings)
    except ValueError as error:
        raise ParameterError(f"{PARAMS}: {path}: {error}") from None
    if not isinstance(made, kind):
        raise ParameterError(
            f"{PARAMS}: {path} must return a {kind.__name__}, returns {type(made).__name__}"
        )
    return path, made


def _parameters_of(make: Callable[..., Component], path: str) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function that returns a component.

    Raises:
      ParameterError: If an annotation, possibly a string, is not a type that YAML has.
    """
    try:
        known = inspect.signature(make, eval_str=True).parameters
    except NameError as error:
        raise ParameterError(f"{PARAMS}: {path}: wrong annotation, {error}") from None
    for key, parameter in known.items():
        if parameter.annotation not in SETTING_KINDS:
            raise ParameterError(
                f"{PARAMS}: {path}: the function's parameter {key} must be annotated as int, float "
                "or str"
            )
    return known


def _find_function(name: str, kind: type[Component]) -> Callable[..., Component]:
    """Returns the function at a dotted path under plugins/.

    Raises:
      ParameterError: If there is none, or it has no docstring, which says what its settings mean.
    """
    found: Any = import_plugin(name)
    if not inspect.isfunction(found):
        raise ParameterError(
            f"{name}: must be a function that returns a {kind.__name__}, got {type(found).__name__}"
        )
    if not inspect.getdoc(found):
        raise ParameterError(
            f"{name}: must have a docstring that says what it computes, and the units of settings"
        )
    return found


def _nearest(name: str, known: Iterable[str], is_part: bool = False) -> str:
    """Returns a hint with the most similar known name, or nothing.

    Args:
      is_part: Whether the name may be that of a file under plugins/.
    """
    if is_part and name.isidentifier() and (PLUGINS / f"{name}.py").is_file():
        return f"; is it plugins.{name}?"
    near = difflib.get_close_matches(name, known, n=1)
    return f"; is it {near[0]}?" if near else ""


def _check_type(value: object, annotation: type, path: str) -> None:
    """Raises unless a setting has the annotated type and is finite; int is accepted for float."""
    accepted = (int, float) if annotation is float else annotation
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ParameterError(f"{PARAMS}: {path} must be {SETTING_KINDS[annotation]}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(f"{PARAMS}: {path} must be a finite number, got {value}")
