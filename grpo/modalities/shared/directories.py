"""Policy directories in safetensors and JSON.

A base's directory is complete: weights, configuration, tokenizer. A round's directory holds the
trained weights, the optimizer state and the provenance. Large tensors are divided into several
files.
"""

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo.errors import ArtifactError, brief, located, refused_by_library
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.tables import is_count
from grpo.runtime.artifacts.tensors import (
    PART_BYTES,
    read_in_parts,
    read_unchecked_tensors,
    require_finite,
    write_in_parts,
)
from grpo.runtime.ranks import gather_into, gather_to_first, is_first_of_host, shard_like
from grpo.runtime.shared_tensors import SharedTensors
from grpo.types import Cost

BASE_NAME = "base"
STATE = "state.json"
WEIGHTS = "model.safetensors"
ADAPTER = "adapter.safetensors"
OPTIMIZER = "optimizer.safetensors"
TRANSFORMER_WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"  # of a diffusers pipeline
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
COPY = "copy"  # the float32 master weight of a parameter
Trained = dict[str, dict[str, Tensor]]  # by file, then by name
OPTIMIZER_FILES = re.compile(r"optimizer(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
WEIGHT_FILES = re.compile(  # of transformers and of diffusers
    r"(model|diffusion_pytorch_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """The state of a policy directory besides tensors; enough to continue its arm."""

    name: str
    arm: str | None = None  # None: the base
    start: str | None = None
    updates: int = 0
    objective_state: dict[str, dict[str, float]] = field(default_factory=dict)
    selection_state: dict[str, dict[str, int | float]] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)  # total over the chain of rounds since the base


def read_state(directory: Path, name: str) -> PolicyState:
    """Returns the state of a policy directory.

    Args:
      name: Name of the round that made the policy, or `base`.

    Raises:
      ArtifactError: If the state is missing, has other fields or belongs to another policy.
    """
    path = directory / STATE
    content = read_json(path)
    try:
        state = PolicyState(**{**content, "cost": Cost(**content["cost"])})
    except (TypeError, KeyError) as error:
        message = f"{path}: must hold the fields of a policy state, {error}; rerun its stage"
        raise ArtifactError(message) from None
    with located(path):
        _require_fields(state, name)
        require_counts(state.cost)
    return state


def _require_fields(state: PolicyState, name: str) -> None:
    """Raises ArtifactError unless all fields of a stored state are valid."""
    is_base = name == BASE_NAME
    of_round = "null" if is_base else "a name in the state of a round"
    rules = {
        "name": (state.name == name, repr(name), state.name),
        "arm": (_is_none(state.arm, is_base), of_round, state.arm),
        "start": (_is_none(state.start, is_base), of_round, state.start),
        "updates": (is_count(state.updates), "a whole number >= 0", state.updates),
    }
    for field_name, (holds, rule, value) in rules.items():
        if not holds:
            raise ArtifactError(f"{field_name} must be {rule}, got {value!r}; rerun its stage")
    for field_name in ("objective_state", "selection_state"):
        for key, numbers in _named(field_name, getattr(state, field_name)).items():
            for part, value in _named(f"{field_name}.{key}", numbers).items():
                if type(value) not in (int, float) or not math.isfinite(value):
                    where = f"{field_name}.{key}.{part}"
                    raise ArtifactError(f"{where} must be a number, got {value!r}; rerun its stage")


def _is_none(value: object, is_base: bool) -> bool:
    return value is None if is_base else isinstance(value, str) and value != ""


def _named(where: str, content: object) -> dict[str, Any]:
    """Returns stored content after a check that it is a JSON object."""
    if not isinstance(content, dict):
        raise ArtifactError(f"{where} must be a JSON object, got {content!r}; rerun its stage")
    return content


def require_counts(cost: Cost) -> None:
    """Raises ArtifactError unless all numbers of a stored cost are whole and at least 0."""
    for name, count in vars(cost).items():
        if not is_count(count):
            raise ArtifactError(
                f"cost.{name} must be a whole number >= 0, got {brief(repr(count))}; "
                "rerun its stage"
            )


def write_state(directory: Path, state: PolicyState) -> None:
    """Writes `state.json`, without the field `selection_state` if it is empty."""
    content = asdict(state)
    if not state.selection_state:
        del content["selection_state"]
    write_json(directory / STATE, content)


def save_base(directory: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """Writes a base policy: weights, configuration, tokenizer and a fresh state.

    Raises:
      ArtifactError: If a weight is not finite, or the disk is full or refuses the write.
    """
    require_finite(dict(model.named_parameters()), directory)
    try:
        model.save_pretrained(directory, max_shard_size=PART_BYTES)
    except SafetensorError as error:
        message = f"{directory}: cannot be written, {error}; make room and rerun"
        raise ArtifactError(message) from None
    tokenizer.save_pretrained(directory)
    write_state(directory, PolicyState(name=BASE_NAME))


def load_base(
    directory: Path, dtype: torch.dtype, *, auto_class: Any = AutoModelForCausalLM
) -> tuple[PreTrainedModel, Any]:
    """Returns the model, in evaluation mode (rule U26), and tokenizer of a directory.

    Args:
      auto_class: An Auto class of transformers for such models.

    Raises:
      ArtifactError: If a file is missing or broken, or a weight is not finite.
    """
    # Read first, because errors of transformers do not name the broken file.
    for path in {directory / "config.json", *directory.glob("*.json")}:
        read_json(path)

    def refuse(why: str) -> ArtifactError:
        return ArtifactError(
            f"{directory}: must be a complete policy directory, {why}; rerun its stage"
        )

    with refused_by_library(refuse):
        loaded: Any = auto_class.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    model, found = loaded
    _require_all_weights(directory, found)
    require_finite(dict(model.named_parameters()), directory)
    return model.eval(), tokenizer


def gather_trained(model: nn.Module, optimizer: PreciseAdamW) -> Trained:
    """Gathers the trainable weights and the optimizer state; a collective of all ranks.

    The first rank gets them complete, the others without tensors.
    """
    moments = _optimizer_tensors(model, optimizer)
    return {
        _weights_name(model): gather_to_first(_weights(model)),
        OPTIMIZER: gather_to_first(moments),
    }


def save_trained(directory: Path, trained: Trained, state: PolicyState) -> None:
    """Writes trained tensors and state; everything else stays in the base's directory."""
    write_trained(directory, trained)
    write_state(directory, state)


def write_trained(directory: Path, trained: Trained) -> None:
    """Writes trainable weights and optimizer state; the files do not depend on the ranks."""
    for file, tensors in trained.items():
        write_in_parts(directory / file, tensors)


def files_for_sampling(directory: Path) -> list[Path]:
    """Returns the files of a policy directory but for those of the optimizer's state."""
    files = (each for each in sorted(directory.rglob("*")) if each.is_file())
    return [each for each in files if not OPTIMIZER_FILES.fullmatch(each.name)]


def read_round(directory: Path, base: Path, model: nn.Module) -> None:
    """Loads a round's trained weights into the base's model; does nothing for the base itself.

    Raises:
      ArtifactError: If the file is missing, broken or belongs to another model.
    """
    if directory.resolve() != base.resolve():
        read_trainable(directory, model, optimizer=None)


@contextmanager
def whole_policy(directory: Path, base: Path) -> Iterator[Path]:
    """Yields a directory with the base's files and the round's weights, as symbolic links.

    For programs that read directories in the format of `save_pretrained`. The optimizer's state is
    left out: vLLM takes each file of safetensors for weights.
    """
    if directory.resolve() == base.resolve():
        yield base
        return
    with tempfile.TemporaryDirectory(prefix="grpo-policy-") as folder:
        for source in (base, directory):
            for file in sorted(source.iterdir()):
                is_replaced = source is base and WEIGHT_FILES.fullmatch(file.name)
                link = Path(folder) / file.name
                if not is_replaced and not OPTIMIZER_FILES.fullmatch(file.name):
                    link.unlink(missing_ok=True)
                    link.symlink_to(file.resolve())
        yield Path(folder)


def read_trainable(directory: Path, model: nn.Module, optimizer: PreciseAdamW | None) -> None:
    """Loads the files of `write_trained`; with optimizer None, only the weights.

    Raises:
      ArtifactError: If a file is missing, broken or belongs to another model.
    """
    weights = directory / _weights_name(model)
    _copy_into(_weights(model), read_in_parts(weights), weights)
    if optimizer is not None:
        moments = directory / OPTIMIZER
        _restore_optimizer(model, optimizer, read_in_parts(moments), moments)


def copy_weights(model: nn.Module, path: Path) -> None:
    """Copies the weights that `offer_weights` has written, or those of such a file, into a model.

    Parameters are known to be finite: `take_step` checks them after every update.

    Raises:
      ArtifactError: If the file is missing, broken or belongs to another model.
    """
    _copy_into(_weights(model), read_unchecked_tensors(path), path)


def require_weights(model: nn.Module, path: Path) -> None:
    """Raises ArtifactError unless a file has the trained weights of such a model, by its header."""
    with located(path), refused_by_library(ArtifactError), safe_open(path, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    _require_shapes(_weights(model), shapes, path)


def offer_weights(model: nn.Module, shared: SharedTensors | None) -> SharedTensors | None:
    """Writes the trained weights to memory, on the first rank of each host; elsewhere returns None.

    All ranks must call it.

    Args:
      shared: What was returned before, to be overwritten; None: nothing yet.
    """
    weights = _weights(model)
    if shared is None and is_first_of_host():
        shared = SharedTensors(weights)
    gather_into(shared.tensors if shared else {}, weights)
    return shared


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trainable parameters by name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _require_all_weights(directory: Path, found: dict[str, Any]) -> None:
    """Raises unless the weights fit config.json: transformers initializes missing ones randomly."""
    if wrong := find_wrong_weights(found):
        raise ArtifactError(
            f"{directory}: must hold the weights of its config.json, {wrong}; rerun its stage"
        )


def find_wrong_weights(
    found: Mapping[str, Any], *, is_left_out: Callable[[str], bool] = lambda key: False
) -> str | None:
    """Returns how loaded weights differ from those of the model; None if they match.

    Libraries initialize missing weights at random and ignore unexpected ones.

    Args:
      found: The loading report of `from_pretrained`.
      is_left_out: Whether the model's class has no use for an unexpected weight.
    """
    for kind in ("missing", "mismatched", "unexpected"):
        keys = sorted(map(str, found.get(f"{kind}_keys") or ()))
        if kind == "unexpected":
            keys = [key for key in keys if not is_left_out(key)]
        if keys:
            return f"{len(keys)} {kind}, the first is {keys[0]}"
    return None


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the stored tensors of a model: trainable weights and, without adapters, buffers."""
    if _weights_name(model) == ADAPTER:
        return trainable(model)
    stored = model.state_dict().keys()
    buffers = {name: each for name, each in model.named_buffers() if name in stored}
    return {**trainable(model), **buffers}


def _weights_name(model: nn.Module) -> str:
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return ADAPTER
    is_in_pipeline = type(model).__module__.startswith("diffusers.")
    return TRANSFORMER_WEIGHTS if is_in_pipeline else WEIGHTS


def _copy_into(targets: dict[str, Tensor], sources: dict[str, Tensor], path: Path) -> None:
    """Copies tensors by name; raises unless names and shapes match."""
    _require_shapes(targets, {name: tuple(each.shape) for name, each in sources.items()}, path)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(shard_like(sources[name], target))


def _require_shapes(
    targets: Mapping[str, Tensor], given: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    wanted = {name: tuple(each.shape) for name, each in targets.items()}
    if wanted != given:
        wrong = sorted(set(wanted.items()) ^ set(given.items()))[0]
        raise ArtifactError(f"{path}: belongs to another model, first difference {wrong}")


def _optimizer_tensors(model: nn.Module, optimizer: PreciseAdamW) -> dict[str, Tensor]:
    """Returns Adam's moments, step counts and master weights by parameter."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainable(model).items():
        master_weight = optimizer.master_weight(parameter)
        state = optimizer.state.get(master_weight, {})
        tensors |= {f"{name}/{key}": value for key, value in state.items()}
        if state and master_weight is not parameter:
            tensors[f"{name}/{COPY}"] = master_weight
    return tensors


def _restore_optimizer(
    model: nn.Module, optimizer: PreciseAdamW, tensors: dict[str, Tensor], path: Path
) -> None:
    """Restores the optimizer state; there is none before the first step."""
    if not tensors:
        return
    for name, parameter in trainable(model).items():
        own = {
            key.removeprefix(f"{name}/"): value
            for key, value in tensors.items()
            if key.rpartition("/")[0] == name
        }
        master_weight = optimizer.master_weight(parameter)
        if set(own) != {"step", *MOMENTS, *([COPY] if master_weight is not parameter else [])}:
            raise ArtifactError(f"{path}: lacks the moments of {name}; rerun its stage")
        step = own.pop("step").to(parameter.device)  # the fused step needs it on the device
        if step.shape or any(each.shape != parameter.shape for each in own.values()):
            raise ArtifactError(f"{path}: belongs to another model, first difference {name}")
        divided = {key: shard_like(value, master_weight) for key, value in own.items()}
        if COPY in divided:
            with torch.no_grad():
                master_weight.copy_(divided.pop(COPY))
        optimizer.state[master_weight] = {"step": step, **divided}
