"""A Stable Diffusion 3 of a few thousand parameters on pixels of 8 by 16, and policies on it."""

from pathlib import Path
from typing import Any

from torch import Generator

from grpo.modalities.denoising.bases import make_pipeline
from grpo.modalities.denoising.modality import Canvas
from grpo.modalities.denoising.policy import DenoisingPolicy, load_denoising_policy
from grpo.modalities.denoising.sde_steps import Denoising
from grpo.params.parameters import Parameters, read_params

ROOT = Path(__file__).parents[2]
CANVAS = Canvas(frames=1, height=8, width=16)
CAPTIONS = ["2A", "777", ""]
TRANSFORMER = {
    "sample_size": 16,
    "patch_size": 4,
    "in_channels": 1,
    "out_channels": 1,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "caption_projection_dim": 32,
    "pos_embed_max_size": 4,
}


def tiny_params(**settings: Any) -> Parameters:
    """Returns the parameters of the image recipe with a tiny transformer."""
    params = read_params(ROOT / "recipes" / "glyphs.yaml")
    base = params.policy.base.model_copy(update={"transformer": TRANSFORMER})
    canvas = CANVAS
    policy = params.policy.model_copy(update={"base": base, "canvas": canvas, **settings})
    return params.model_copy(update={"policy": policy})


def tiny_decoding(**settings: Any) -> Denoising:
    """Returns noise in every step, unless told otherwise."""
    chosen: dict[str, Any] = {
        "num_steps": 5,
        "density": "flow_sde",
        "noise_level": 0.7,
        "stochastic": "all",
        "window": (0, 4),
        "guidance": 1.0,
    }
    return Denoising(**{**chosen, **settings})


def tiny_denoiser(**settings: Any) -> DenoisingPolicy:
    """Returns a fresh policy."""
    pipeline = make_pipeline(tiny_params(), ROOT / "data")
    pipeline.transformer.requires_grad_()
    decoding = tiny_decoding(**settings)
    return DenoisingPolicy(pipeline, decoding=decoding, canvas=CANVAS, num_tokens=1)


def reload(directory: Path, base: Path, params: Parameters) -> DenoisingPolicy:
    """Returns the policy of a directory."""
    return load_denoising_policy(params, base=base, directory=directory, decoding=tiny_decoding())


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)
