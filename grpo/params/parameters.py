"""Typed parameters: the only reader of params.yaml. Everything is stated; nothing has a default."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    Field,
    TypeAdapter,
    ValidationError,
)

from grpo.errors import ParameterError
from grpo.params.machine import Machine, SamplingEngine
from grpo.params.policy import (
    ActionChunkPolicyParams,
    DenoisingPolicyParams,
    Draws,
    Fraction,
    Name,
    NonNegative,
    PolicyParams,
    Positive,
    Rate,
    Sampling,
    ScratchFlowBase,
    Strict,
    TokenPolicyParams,
    kind_of_draws,
)
from grpo.params.reward import MEDIA_JUDGES, Reward, check_reward
from grpo.params.task import GlyphsTask, ManipulationTask, Task

PARAMS = Path("params.yaml")
DATA = Path("data")  # where params.yaml names files in
LONGEST_ROLLOUT = 500  # steps of the simulator, after which Meta-World refuses to go on
PAIRS = ("betas", "window", "fallback", "score_range", "patch_size")
TASKS = {  # by kind of policy
    "tokens": ("reasoning_gym", "jsonl"),
    "denoising": ("glyphs", "jsonl"),
    "action_chunks": ("manipulation",),
}
Kind = TypeVar("Kind", TokenPolicyParams, DenoisingPolicyParams, ActionChunkPolicyParams)
BASE = "base"  # the name of the policy every chain of rounds starts from


LinkSpec = str | dict[str, dict[str, int | float | str]]  # "rloo" or {rloo: {low: 0.2}}


class Profile(Strict):
    rollouts_per_prompt: Positive
    rollouts_per_batch: Positive


class Training(Strict):
    updates_per_round: Positive
    learning_rate: Rate
    betas: tuple[Fraction, Fraction]
    weight_decay: NonNegative
    max_grad_norm: Rate
    tokens_per_microbatch: Positive  # rows times width of one forward pass
    updates_per_checkpoint: Positive
    updates_per_audit: Annotated[int, Field(ge=0)]  # the full gradient beside; 0: never
    ranks: Positive  # processes that train together; the order of sums, and so the last bits


class Arm(Strict):
    curriculum: list[LinkSpec] = Field(min_length=1)
    selection: list[LinkSpec]  # where rollouts are spent; none: on every prompt of a phase
    sampling: Sampling
    objective: list[LinkSpec] = Field(min_length=1)
    training: Training


class Round(Strict):
    arm: Name
    start: Name
    phase: Positive


class Evaluation(Strict):
    sampling: Draws
    rollouts_per_prompt: Annotated[int, Field(ge=2)]
    rollouts_per_batch: Positive
    confidence: Annotated[float, Field(gt=0, lt=1)]
    bootstrap_resamples: Positive


class Parameters(Strict):
    seed: Annotated[int, Field(ge=0)]
    machine: Machine
    sampling: SamplingEngine
    task: Task
    policy: PolicyParams
    profile: Profile
    reward: Reward
    evaluation: Evaluation
    arms: dict[Name, Arm] = Field(min_length=1)
    rounds: dict[Name, Round] = Field(min_length=1)

    @property
    def tokens(self) -> TokenPolicyParams:
        """The policy; raises ParameterError unless its steps are tokens."""
        return self._policy_of(TokenPolicyParams, "tokens")

    @property
    def denoising(self) -> DenoisingPolicyParams:
        """The policy; raises ParameterError unless its steps are denoising steps."""
        return self._policy_of(DenoisingPolicyParams, "denoising")

    @property
    def action_chunks(self) -> ActionChunkPolicyParams:
        """The policy; raises ParameterError unless its steps are chunks of actions."""
        return self._policy_of(ActionChunkPolicyParams, "action_chunks")

    def _policy_of(self, kind: type[Kind], name: str) -> Kind:
        if not isinstance(self.policy, kind):
            raise ParameterError(
                f"{PARAMS}: policy.kind must be {name} for this, got {self.policy.kind!r}"
            )
        return self.policy

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
        """Returns an arm; raises ParameterError if there is none of that name."""
        if name not in self.arms:
            raise ParameterError(f"{PARAMS}: arms.{name} is missing, there are {sorted(self.arms)}")
        return self.arms[name]

    def find_round(self, name: str) -> Round:
        """Returns a round; raises ParameterError if there is none of that name."""
        if name not in self.rounds:
            known = sorted(self.rounds)
            raise ParameterError(f"{PARAMS}: rounds.{name} is missing, there are {known}")
        return self.rounds[name]


def read_params(path: Path = PARAMS) -> Parameters:
    """Returns the typed content of a parameter file.

    Raises:
      ParameterError: If the file is missing, no YAML, or a parameter is wrong: one line that
        names the file, the first wrong parameter's path, what must hold, and the value.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ParameterError(f"{path}: no such file; copy one from recipes/") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path}: must be YAML, {' '.join(str(error).split())}") from None
    try:
        params = TypeAdapter(Parameters).validate_python(with_tuples(content))
    except ValidationError as error:
        raise ParameterError(f"{path}: {_explain(error)}") from None
    _check_rounds(params, path)
    if params.sampling.engine == "local" and params.sampling.workers > 1:
        raise ParameterError(
            f"{path}: sampling.workers must be 1 with sampling.engine local, "
            f"got {params.sampling.workers}; set the engine to processes or ray"
        )
    if params.reward.judge == "reasoning_gym" and params.task.kind != "reasoning_gym":
        raise ParameterError(
            f"{path}: reward.judge reasoning_gym needs task.kind reasoning_gym, "
            f"got {params.task.kind!r}; set the judge to math or your own"
        )
    check_reward(params.reward, path)
    _check_policy(params, path)
    return params


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Makes errors about components name the file that was read; they know params.yaml alone."""
    try:
        yield
    except ParameterError as error:
        path, _, message = str(error).partition(": ")
        raise ParameterError(f"{file if path == str(PARAMS) else path}: {message}") from None


def with_tuples(value: Any) -> Any:
    """Returns `value` with its pairs as the tuples that strict validation asks for."""
    if isinstance(value, dict):
        return {
            key: tuple(item) if key in PAIRS and isinstance(item, list) else with_tuples(item)
            for key, item in value.items()
        }
    return value


def _check_rounds(params: Parameters, path: Path) -> None:
    """Raises unless every round names an arm and starts from the base or an earlier round."""
    known = {BASE}
    for name, each in params.rounds.items():
        where = f"{path}: rounds.{name}"
        if name in known:
            raise ParameterError(f"{where}: {name!r} is the base policy's name; choose another")
        if each.arm not in params.arms:
            raise ParameterError(
                f"{where}.arm must be one of {sorted(params.arms)}, got {each.arm!r}"
            )
        if each.start not in known:
            raise ParameterError(
                f"{where}.start must be 'base' or a round above it, got {each.start!r}"
            )
        known.add(name)


def _check_policy(params: Parameters, path: Path) -> None:
    """Raises unless task, judge, draws and machine fit the kind of policy."""
    policy, kind = params.policy, params.policy.kind
    draws = {f"arms.{name}.sampling": arm.sampling for name, arm in params.arms.items()}
    for where, each in {**draws, "evaluation.sampling": params.evaluation.sampling}.items():
        wanted = "num_steps" if kind == "denoising" else "temperature"
        if (wanted == "num_steps") != (kind_of_draws(each) == "denoising"):
            raise ParameterError(
                f"{path}: {where} must say {wanted}, for policy.kind is {kind}, "
                f"got {sorted(each.model_dump())}"
            )
    tasks = TASKS[kind]
    if params.task.kind not in tasks:
        raise ParameterError(
            f"{path}: task.kind must be one of {tasks} with policy.kind {kind}, "
            f"got {params.task.kind!r}"
        )
    if isinstance(policy, DenoisingPolicyParams):
        _check_clips(params, policy, path)
    if isinstance(params.task, ManipulationTask):
        _check_chunks(params.action_chunks, params.task, path)
    if (params.reward.judge == "simulator") != (kind == "action_chunks"):
        raise ParameterError(
            f"{path}: reward.judge simulator and policy.kind action_chunks need each other, "
            f"got {params.reward.judge!r} and {kind!r}"
        )
    if (params.reward.judge in MEDIA_JUDGES) != (kind == "denoising"):
        raise ParameterError(
            f"{path}: a reward.judge in {MEDIA_JUDGES} and policy.kind denoising need each other, "
            f"got {params.reward.judge!r} and {kind!r}"
        )
    if isinstance(policy, TokenPolicyParams):
        _check_sampler(params.machine, policy, path)
        _check_compile(params.machine, policy, path)
    elif params.machine.compile:
        raise ParameterError(f"{path}: with policy.kind {kind}, machine.compile must be false")
    _check_ranks(params, path)


def _check_sampler(machine: Machine, policy: TokenPolicyParams, path: Path) -> None:
    """Raises if vLLM is asked for what it does not do here."""
    wrong = {
        "machine.device must be cuda": machine.device != "cuda",
        "policy.lora must be null: the engine loads whole policies": policy.lora is not None,
        "policy.routing must not be replay_sampled: the engine records no experts": (
            policy.routing == "replay_sampled"
        ),
    }
    for what, is_wrong in wrong.items():
        if policy.sampler == "vllm" and is_wrong:
            raise ParameterError(f"{path}: with policy.sampler vllm, {what}")


def _check_compile(machine: Machine, policy: TokenPolicyParams, path: Path) -> None:
    """Raises if compiled passes are asked to record or replay routing, which hooks do."""
    if machine.compile and policy.routing != "live":
        raise ParameterError(
            f"{path}: with machine.compile true, policy.routing must be live, "
            f"got {policy.routing!r}"
        )


def _check_ranks(params: Parameters, path: Path) -> None:
    """Raises if ranks are to divide what they cannot."""
    policy = params.policy
    wrong = {
        "policy.kind must be tokens": not isinstance(policy, TokenPolicyParams),
        "machine.compile must be false": params.machine.compile,
        "policy.routing must not be replay_proximal: a rank knows its own rollouts' experts": (
            isinstance(policy, TokenPolicyParams) and policy.routing == "replay_proximal"
        ),
    }
    for name, arm in params.arms.items():
        for what, is_wrong in wrong.items():
            if arm.training.ranks > 1 and is_wrong:
                raise ParameterError(f"{path}: with arms.{name}.training.ranks above 1, {what}")


def _explain(error: ValidationError) -> str:
    """Returns the first problem as one line: path, rule, value."""
    problems = error.errors()
    first = problems[0]
    if _is_form(first["loc"]):  # what is wrong within the other form of a link says more
        link = first["loc"][:-1]
        within = [each for each in problems if each["loc"][: len(link)] == link]
        first = max(within, key=lambda each: len(each["loc"]))
    message = first["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    wording = {"Field required": "is missing", "Extra inputs are not permitted": "is unknown"}
    message = wording.get(message, message)
    got = "" if first["type"] == "missing" else f", got {first['input']!r}"
    return f"{_path(first['loc'])} {message}{got}"


def _is_form(location: tuple[int | str, ...]) -> bool:
    """Returns whether a problem is that a link is no plain name."""
    return location[-1:] == ("str",) and isinstance(location[-2], int)


def _check_clips(params: Parameters, policy: DenoisingPolicyParams, path: Path) -> None:
    """Raises unless all agree whether images or clips are drawn."""
    task, base = params.task, policy.base
    moves = isinstance(task, GlyphsTask) and task.pixels_per_frame is not None
    has_frames = policy.canvas.frames > 1
    if isinstance(task, GlyphsTask) and moves != has_frames:
        raise ParameterError(
            f"{path}: task.pixels_per_frame and more than one of policy.canvas.frames need each "
            f"other, got {task.pixels_per_frame} and {policy.canvas.frames}"
        )
    if isinstance(base, ScratchFlowBase) and (base.architecture == "WanPipeline") != has_frames:
        raise ParameterError(
            f"{path}: policy.base.architecture must be WanPipeline for clips and "
            f"StableDiffusion3Pipeline for images, got {base.architecture} with "
            f"{policy.canvas.frames} of policy.canvas.frames"
        )
    if params.reward.judge == "moving_ocr" and not moves:
        raise ParameterError(
            f"{path}: reward.judge moving_ocr needs task.pixels_per_frame, got none"
        )


def _check_chunks(policy: ActionChunkPolicyParams, task: ManipulationTask, path: Path) -> None:
    """Raises unless chunks divide as they should, and every family is demonstrated."""
    chunk, shown = policy.base.chunk, sorted(policy.base.warmup.demonstrations)
    wrong = {
        f"policy.base.chunk.positions must divide chunk.length {chunk.length}, "
        f"got {chunk.positions}": chunk.length % chunk.positions != 0,
        f"policy.max_steps times chunk.length must be at most {LONGEST_ROLLOUT}, "
        f"got {policy.max_steps * chunk.length}": policy.max_steps * chunk.length > LONGEST_ROLLOUT,
        "policy.base.warmup.demonstrations must name the families of the task, "
        f"{sorted(task.families)}, got {shown}": shown != sorted(set(task.families)),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ParameterError(f"{path}: {what}")


def _path(location: tuple[int | str, ...]) -> str:
    """Returns the dotted path, without the names of union members that pydantic adds."""
    members = {
        "task": {"reasoning_gym", "jsonl", "glyphs", "manipulation"},
        "policy": {"tokens", "denoising", "action_chunks"},
        "backbone": {"scratch", "directory", "hub", "s3"},
        "base": {"scratch", "directory", "gguf", "hub", "s3"},
        "encoder": {"scratch", "directory", "hub", "s3"},
        "model": {"directory", "hub", "s3"},
        "sampling": {"tokens", "denoising"},
    }
    kept = [
        part
        for before, part in zip(("", *location), location)
        if part not in members.get(str(before), ()) and not str(part).startswith(("dict[", "[key]"))
    ]
    is_link = any(isinstance(part, int) for part in kept)
    while is_link and kept[-1] in {"str", "int", "float"}:
        kept.pop()
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in kept]
    return "".join(parts).lstrip(".") or "the file"
