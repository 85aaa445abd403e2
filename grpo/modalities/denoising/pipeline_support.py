"""Which pipelines of diffusers are drawn from as they say: what is not read is refused by name."""

import inspect
from collections.abc import Mapping
from typing import Any

from grpo.modalities.denoising.parameters import Canvas
from grpo.modalities.denoising.pipelines import FAMILIES, pixels_per_position

# Schedulers whose sigmas are shares of noise, under these settings; drawing takes the sigmas alone.
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
NOTHING = (None, False, [None, None], (None, None))  # how a model index says that there is none


def find_unread_component(index: Mapping[str, Any]) -> str | None:
    """Returns what of a model index would change what is drawn and is not read; None: nothing."""
    families = {each.__name__: family for each, family in FAMILIES.items()}
    name = index.get("_class_name")
    if name not in families:
        return f"_class_name must be one of {sorted(families)}, got {name!r}"
    family = families[name]
    reads = {"scheduler", *family.classes, *(each for pair in family.encoders for each in pair)}
    for component in ("transformer", "scheduler", *family.pooled):
        if index.get(component) in NOTHING:
            return f"{component} must be there, the index has none"
    for component, value in index.items():
        if component not in reads and not component.startswith("_") and value not in NOTHING:
            return (
                f"{component} {value!r} would change what is drawn and is not read; use a pipeline "
                "without it, such as Stable Diffusion 3.5 or Wan 2.1"
            )
        expected = family.classes.get(component)
        if expected and value not in NOTHING and value[1] != expected:
            return f"{component} must be a {expected}, got {value[1]!r}"
    return None


def find_unread_setting(pipeline: Any) -> str | None:
    """Returns what of its components' configurations would, and is not read; None: nothing."""
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
                return f"{name}: {key} {config[key]!r} is not read by {type(component).__name__}"
    channels = transformer.config.in_channels
    if transformer.config.out_channels not in (None, channels):
        return f"transformer: out_channels must be in_channels {channels}: images are not read"
    latents = vae and (vae.config.get("z_dim") or vae.config.get("latent_channels"))
    if latents and latents != channels:
        return f"transformer: in_channels must be the autoencoder's {latents}, got {channels}"
    return None


def find_misfit(pipeline: Any, canvas: Canvas) -> str | None:
    """Returns why a canvas cannot be drawn by a pipeline; None: it can."""
    *frames, height, width = pixels_per_position(pipeline)
    if not frames and canvas.frames != 1:
        return f"frames must be 1 for images, got {canvas.frames}"
    for name, side in (("height", height), ("width", width)):
        if getattr(canvas, name) % side:
            return f"{name} must be a multiple of {side}, got {getattr(canvas, name)}"
    return None
