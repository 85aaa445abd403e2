"""Access to diffusers pipelines: text conditions, latents, pixels, schedules and storage."""

import inspect
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from safetensors import SafetensorError
from torch import Tensor

from grpo.errors import ArtifactError, MissingExtraError, ParameterError, brief, refused_by_library
from grpo.modalities.denoising.modality import Canvas
from grpo.modalities.denoising.sde_steps import require_falling
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tensors import require_finite
from grpo.schema import PARAMS

try:
    import diffusers
except ImportError:
    raise MissingExtraError(
        f"{PARAMS}: policy.kind denoising needs diffusers; run pip install -e '.[denoising]'"
    ) from None

library: Any = diffusers  # diffusers is not typed
# Supported schedulers and settings: their sigmas are fractions of noise. Only the sigmas are used.
SCHEDULERS: dict[str, dict[str, Any]] = {
    "FlowMatchEulerDiscreteScheduler": {
        "num_train_timesteps": 1000,
        "invert_sigmas": False,
        "stochastic_sampling": False,
    },
    "UniPCMultistepScheduler": {
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "use_dynamic_shifting": False,
        "final_sigmas_type": "zero",
        "thresholding": False,
    },
}
NOTHING = (None, False, [None, None], (None, None))  # spellings of an absent component in an index
INDEX = "model_index.json"
LEVELS = 255  # largest level of a pixel


def find_unsupported_component(index: Mapping[str, Any]) -> str | None:
    """Returns an error for components of a model index that are unsupported; None: no error."""
    families = {each.__name__: family for each, family in FAMILIES.items()}
    name = index.get("_class_name")
    if name not in families:
        return f"_class_name must be one of {sorted(families)}, got {name!r}"
    family = families[name]
    reads = {"scheduler", *family.classes, *(each for pair in family.encoders for each in pair)}
    for component in ("transformer", "scheduler", *family.pooled):
        if index.get(component) in NOTHING:
            return f"{component} must be present, got none in the model index"
    for component, value in index.items():
        if component not in reads and not component.startswith("_") and value not in NOTHING:
            return (
                f"{component} {value!r} is not supported and would change the samples; use a "
                "pipeline without it, such as Stable Diffusion 3.5 or Wan 2.1"
            )
        expected = family.classes.get(component)
        if expected and value not in NOTHING and value[1] != expected:
            return f"{component} must be a {expected}, got {value[1]!r}"
    return None


def find_unsupported_setting(pipeline: Any) -> str | None:
    """Returns an error for settings of components that are unsupported; None: no error."""
    transformer, scheduler, vae = pipeline.transformer, pipeline.scheduler, pipeline.vae
    expected = SCHEDULERS.get(type(scheduler).__name__)
    if expected is None:
        return f"scheduler must be one of {sorted(SCHEDULERS)}, got {type(scheduler).__name__}"
    fixed: dict[str, tuple[Any, Mapping[str, Any]]] = {
        "scheduler": (scheduler, expected),
        "transformer": (transformer, FAMILIES[type(pipeline)].fixed),
    }
    if vae is not None:
        fixed["vae"] = (vae, {})
    for name, (component, settings) in fixed.items():
        config = dict(component.config)
        for key, value in settings.items():
            if config.get(key) != value:
                return f"{name}: {key} must be {value!r}, got {config.get(key)!r}"
        known = inspect.signature(type(component).__init__).parameters
        for key in sorted(config):
            if not key.startswith("_") and key not in known:
                return (
                    f"{name}: {key} {config[key]!r} is not supported by {type(component).__name__}"
                )
    channels = transformer.config.in_channels
    if transformer.config.out_channels not in (None, channels):
        return (
            f"transformer: out_channels must equal in_channels {channels}: image inputs are not "
            "supported"
        )
    latents = vae and (vae.config.get("z_dim") or vae.config.get("latent_channels"))
    if latents and latents != channels:
        return f"transformer: in_channels must be the autoencoder's {latents}, got {channels}"
    return None


def require_canvas(pipeline: Any, canvas: Canvas) -> None:
    """Raises ParameterError unless a pipeline can generate a canvas."""
    if misfit := _find_canvas_error(pipeline, canvas):
        raise ParameterError(f"{PARAMS}: policy.canvas.{misfit}")


def _find_canvas_error(pipeline: Any, canvas: Canvas) -> str | None:
    *frames, height, width = pixels_per_position(pipeline)
    if not frames and canvas.frames != 1:
        return f"frames must be 1 for images, got {canvas.frames}"
    if frames:
        factor, patch = _factors(pipeline)[0], _patches(pipeline)[0]
        if (canvas.frames - 1) % factor or -(-canvas.frames // factor) % patch:
            possible = [1 + factor * (n * patch - 1) for n in (1, 2, 3)]
            return f"frames must be {', '.join(map(str, possible))}, ..., got {canvas.frames}"
    for name, side in (("height", height), ("width", width)):
        if getattr(canvas, name) % side:
            return f"{name} must be a multiple of {side}, got {getattr(canvas, name)}"
    return None


class Family(NamedTuple):
    """How one class of pipelines encodes captions, and the inputs of its transformer."""

    conditions: tuple[str, ...]  # names of the transformer's inputs besides state and time
    encode: Callable[[Any, list[str], int], tuple[Tensor, ...]]
    pool: Callable[[dict[str, Tensor]], Tensor]  # conditions -> one vector per caption
    encoders: tuple[tuple[str, str], ...]  # names of text encoders and their tokenizers
    pooled: tuple[str, ...]  # names of the text encoders that `pool` depends on
    factors: Callable[[Any], tuple[int, ...]]  # pixels per latent: frames of a clip, height, width
    decode: Callable[[Any, Tensor], Tensor]  # latents -> pixels in [-1, 1] by the autoencoder
    classes: Mapping[str, str]  # required classes of components
    fixed: Mapping[str, Any]  # required values of transformer settings that are not supported


def silence_diffusers() -> None:
    """Turns off the progress bars and warnings of diffusers."""
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()


def load_pipeline(directory: Path, dtype: torch.dtype) -> Any:
    """Returns the pipeline of a directory without dropout and safety checker.

    Raises:
      ArtifactError: If a file is missing or broken, or a weight is not finite.
    """
    silence_diffusers()
    for path in sorted(directory.glob("**/*.json")):
        read_json(path)
    # from_pretrained needs an explicit None for an absent component.
    absent = [name for name, each in read_index(directory).items() if each == [None, None]]
    from_pretrained = library.DiffusionPipeline.from_pretrained
    with refused_by_library(
        lambda why: ArtifactError(
            f"{directory}: must be a complete policy directory, {why}; rerun its stage"
        )
    ):
        pipeline = from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            **dict.fromkeys(absent),
        )
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval().requires_grad_(module is pipeline.transformer)
    _require_finite(pipeline, directory)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def read_index(directory: Path) -> dict[str, Any]:
    """Returns a stored pipeline's components by name and its class.

    Raises:
      ArtifactError: If the file is missing or holds other content.
    """
    index = read_json(directory / INDEX)
    if not isinstance(index, dict):
        raise ArtifactError(
            f"{directory / INDEX}: must hold components by name, got {brief(repr(index))}; rerun "
            "its stage"
        )
    return index


def save_pipeline(directory: Path, pipeline: Any) -> None:
    """Writes every component as safetensors and JSON.

    Raises:
      ArtifactError: If a weight is not finite, or the disk is full or refuses the write.
    """
    _require_finite(pipeline, directory)
    try:
        pipeline.save_pretrained(directory, safe_serialization=True)
    except SafetensorError as error:
        message = f"{directory}: cannot be written, {error}; make room and rerun"
        raise ArtifactError(message) from None


def _require_finite(pipeline: Any, directory: Path) -> None:
    """Raises ArtifactError if a weight of a component is not finite."""
    for name, module in sorted(pipeline.components.items()):
        if isinstance(module, torch.nn.Module):
            require_finite(dict(module.named_parameters()), directory / name)


def encode_captions(
    pipeline: Any, captions: list[str], num_tokens: int
) -> dict[str, Float[Tensor, "caption ..."]]:
    """Returns the transformer's text conditions, one row per caption.

    Args:
      num_tokens: Caption length of the T5 encoder; captions are padded or truncated to it.
    """
    family = FAMILIES[type(pipeline)]
    return dict(zip(family.conditions, family.encode(pipeline, captions, num_tokens), strict=True))


def condition_names(pipeline: Any) -> tuple[str, ...]:
    """Returns the names of the conditions from `encode_captions`."""
    return FAMILIES[type(pipeline)].conditions


def stored_condition_names(directory: Path) -> tuple[str, ...]:
    """Returns `condition_names` of a stored pipeline.

    Raises:
      ArtifactError: If the pipeline's class is not supported.
    """
    known = {each.__name__: family.conditions for each, family in FAMILIES.items()}
    name = read_index(directory).get("_class_name")
    if name not in known:
        raise ArtifactError(f"{directory / INDEX}: must name one of {sorted(known)}, got {name!r}")
    return known[name]


def pool_conditions(
    pipeline: Any, conditions: dict[str, Float[Tensor, "caption ..."]]
) -> Float[Tensor, "caption dim"]:
    """Returns one embedding per caption whose direction encodes its meaning."""
    return FAMILIES[type(pipeline)].pool(conditions)


def text_encoders(pipeline: Any, *, pooled: bool = False) -> list[tuple[Any, Any]]:
    """Returns the text encoders of a pipeline, each with its tokenizer.

    Args:
      pooled: Whether to return only the encoders that `pool_conditions` depends on.
    """
    family = FAMILIES[type(pipeline)]
    return [
        (pipeline.components[encoder], pipeline.components[tokenizer])
        for encoder, tokenizer in family.encoders
        if pipeline.components[encoder] is not None and (not pooled or encoder in family.pooled)
    ]


def latent_shape(pipeline: Any, canvas: Canvas) -> tuple[int, ...]:
    """Returns the shape of one sample's latents, or of its pixels without an autoencoder."""
    factors = _factors(pipeline)
    sides = (canvas.frames, canvas.height, canvas.width)[-len(factors) :]
    channels: int = pipeline.transformer.config.in_channels
    # The first frame of a clip has its own latent, hence the ceiling division.
    return channels, *(-(-side // factor) for side, factor in zip(sides, factors, strict=True))


def num_positions(pipeline: Any, canvas: Canvas) -> int:
    """Returns the length of the transformer's sequence for one sample."""
    _, *sides = latent_shape(pipeline, canvas)
    return prod(side // each for side, each in zip(sides, _patches(pipeline), strict=True))


def pixels_per_position(pipeline: Any) -> tuple[int, ...]:
    """Returns the pixels per position of the transformer: frames (of clips), height, width."""
    return tuple(
        factor * patch for factor, patch in zip(_factors(pipeline), _patches(pipeline), strict=True)
    )


def sigmas_of(pipeline: Any, num_steps: int, canvas: Canvas) -> list[float]:
    """Returns the scheduler's sigmas, descending to 0, in float32 for every model dtype.

    A resolution-dependent shift uses the canvas.

    Raises:
      ArtifactError: If the scheduler's sigmas do not fall from at most 1 to 0.
    """
    config = pipeline.scheduler.config
    scheduler = type(pipeline.scheduler).from_config(config)
    try:
        shift = {"mu": _shift(pipeline, canvas)} if config.get("use_dynamic_shifting") else {}
        scheduler.set_timesteps(num_steps, **shift)
        sigmas: list[float] = scheduler.sigmas.float().tolist()
        require_falling(sigmas)
    except (ValueError, TypeError) as error:
        raise ArtifactError(
            f"scheduler/scheduler_config.json: {type(scheduler).__name__} must give a schedule of "
            f"{num_steps} steps, {brief(error)}; use the scheduler that the model came with"
        ) from None
    return sigmas


def _shift(pipeline: Any, canvas: Canvas) -> float:
    """Returns the schedule's shift for a canvas; it is linear in the number of positions."""
    config = pipeline.scheduler.config
    positions = config.max_image_seq_len - config.base_image_seq_len
    slope = (config.max_shift - config.base_shift) / positions
    beyond = num_positions(pipeline, canvas) - config.base_image_seq_len
    shift: float = config.base_shift + slope * beyond
    if config.time_shift_type == "linear" and shift <= 0:
        raise ValueError(
            f"its shift must be above 0, got {shift} at {num_positions(pipeline, canvas)} positions"
        )
    return shift


@torch.no_grad()
def to_pixels(pipeline: Any, state: Float[Tensor, " row *sample"]) -> UInt8[Tensor, " row *pixels"]:
    """Returns images or clips with channels first, in 256 levels."""
    if pipeline.vae is not None:
        state = FAMILIES[type(pipeline)].decode(pipeline.vae, state)
    levels = (state.float().clamp(-1, 1) + 1) * (LEVELS / 2)
    return levels.round().to(torch.uint8).cpu()


def to_state(pixels: UInt8[Tensor, " row *sample"]) -> Float[Tensor, " row *sample"]:
    """Returns the state of images in pixel space; the inverse of `to_pixels`."""
    return pixels.float() / (LEVELS / 2) - 1


def _factors(pipeline: Any) -> tuple[int, ...]:
    """Returns pixels per latent: frames (of clips), height, width."""
    factors = FAMILIES[type(pipeline)].factors(pipeline)
    return (1,) * len(factors) if pipeline.vae is None else factors


def _patches(pipeline: Any) -> tuple[int, ...]:
    """Returns latents per position of the transformer: frames (of clips), height, width."""
    patch: int | list[int] = pipeline.transformer.config.patch_size
    return (patch,) * len(_factors(pipeline)) if isinstance(patch, int) else tuple(patch)


def _encode_sd3(pipeline: Any, captions: list[str], num_tokens: int) -> tuple[Tensor, ...]:
    states, _, pooled, _ = pipeline.encode_prompt(
        prompt=captions,
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=False,
        max_sequence_length=num_tokens,
    )
    return states, pooled


def _decode_sd3(vae: Any, state: Tensor) -> Tensor:
    latents = state / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    pixels: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
    return pixels


def _encode_wan(pipeline: Any, captions: list[str], num_tokens: int) -> tuple[Tensor, ...]:
    states, _ = pipeline.encode_prompt(
        prompt=captions, do_classifier_free_guidance=False, max_sequence_length=num_tokens
    )
    return (states,)


def _decode_wan(vae: Any, state: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(each, device=state.device, dtype=state.dtype).view(1, -1, 1, 1, 1)
        for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    pixels: Tensor = vae.decode((state * std + mean).to(vae.dtype), return_dict=False)[0]
    return pixels


FAMILIES: dict[type, Family] = {
    library.StableDiffusion3Pipeline: Family(
        conditions=("encoder_hidden_states", "pooled_projections"),
        encode=_encode_sd3,
        pool=lambda conditions: conditions["pooled_projections"],
        encoders=(
            ("text_encoder", "tokenizer"),
            ("text_encoder_2", "tokenizer_2"),
            ("text_encoder_3", "tokenizer_3"),
        ),
        pooled=("text_encoder", "text_encoder_2"),  # not T5
        factors=lambda pipeline: (pipeline.vae_scale_factor,) * 2,
        decode=_decode_sd3,
        classes={"transformer": "SD3Transformer2DModel", "vae": "AutoencoderKL"},
        fixed={},
    ),
    library.WanPipeline: Family(
        conditions=("encoder_hidden_states",),
        encode=_encode_wan,
        # Embeddings of padding are 0.
        pool=lambda conditions: conditions["encoder_hidden_states"].sum(dim=1),
        encoders=(("text_encoder", "tokenizer"),),
        pooled=("text_encoder",),
        factors=lambda pipeline: (
            pipeline.vae_scale_factor_temporal,
            *(pipeline.vae_scale_factor_spatial,) * 2,
        ),
        decode=_decode_wan,
        classes={"transformer": "WanTransformer3DModel", "vae": "AutoencoderKLWan"},
        fixed={"image_dim": None, "added_kv_proj_dim": None, "pos_embed_seq_len": None},
    ),
}
