"""Pipelines as recipes load them: precisions, components and settings that are not read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import SiglipVisionConfig, SiglipVisionModel

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.denoising.bases import make_pipeline
from grpo.modalities.denoising.modality import Canvas
from grpo.modalities.denoising.pipelines import library, save_pipeline, stored_condition_names
from grpo.modalities.denoising.policy import DenoisingPolicy, load_denoising_policy
from grpo.modalities.denoising.sde_steps import Denoising
from grpo.params.parameters import Parameters, read_params
from grpo.schema import DirectoryBase
from tests.modalities.lora_cases import lora_cases
from tests.modalities.tiny_denoiser import seeded, tiny_decoding
from tests.modalities.tiny_pipelines import (
    CLIP,
    IMAGE,
    WAN_SCHEDULER,
    tiny_sd3,
    tiny_wan,
    tiny_wan_transformer,
)

RECIPES = Path(__file__).parents[2] / "recipes"
MADE: dict[str, tuple[Any, Canvas]] = {
    "images-sd35": (tiny_sd3, IMAGE),
    "clips-wan": (tiny_wan, CLIP),
}


def recipe(name: str, canvas: Canvas, **settings: Any) -> Parameters:
    """Returns the parameters of a recipe for a GPU, on the CPU and a small canvas."""
    params = read_params(RECIPES / f"{name}.yaml")
    machine = params.machine.model_copy(update={"device": "cpu"})
    update = {"canvas": canvas, "caption_tokens": 16, **settings}
    policy = params.policy.model_copy(update=update)
    return params.model_copy(update={"policy": policy, "machine": machine})


def load(params: Parameters, base: Path, decoding: Denoising | None = None) -> DenoisingPolicy:
    return load_denoising_policy(
        params, base=base, directory=base, decoding=decoding or tiny_decoding(guidance=4.5)
    )


@pytest.mark.parametrize(("name", "lora"), lora_cases(dict.fromkeys(MADE, "lora")))
def test_a_recipe_in_its_own_precision_draws_scores_and_has_gradients(
    tmp_path: Path, name: str, lora: bool
):
    """Loaded in bfloat16, a class may keep some of its modules in float32: Wan keeps its first."""
    make, canvas = MADE[name]
    params = recipe(name, canvas, **({} if lora else {"lora": None}))
    assert params.machine.dtype == "bfloat16"
    save_pipeline(tmp_path, make())
    policy = load(params, tmp_path)
    trajectory, logp = policy.sample(["2A", "7"], group_sizes=[2, 1], generator=seeded())
    assert policy.model.dtype == torch.bfloat16
    assert logp[trajectory.mask].isfinite().all()
    assert trajectory.media.shape[0] == 3
    scored = policy.log_prob(trajectory)
    torch.testing.assert_close(scored.detach(), logp, rtol=1e-2, atol=0.5)
    scored.sum().backward()
    trained = [each for each in policy.model.parameters() if each.requires_grad]
    gradients = [each.grad for each in trained if each.grad is not None]
    assert len(gradients) > 0
    assert all(each.isfinite().all() for each in gradients)
    if name == "clips-wan":
        assert {each.dtype for each in policy.model.parameters()} == {
            torch.float32,
            torch.bfloat16,
        }


def wan_with(**settings: Any) -> Any:
    return tiny_wan(scheduler=library.UniPCMultistepScheduler(**{**WAN_SCHEDULER, **settings}))


REFUSED: dict[str, tuple[Any, str]] = {
    "two transformers": (
        lambda: tiny_wan(transformer_2=tiny_wan_transformer()),
        r"transformer_2 .* is not supported",
    ),
    "two transformers by time": (lambda: tiny_wan(boundary_ratio=0.875), "boundary_ratio 0.875"),
    "times by position": (lambda: tiny_wan(expand_timesteps=True), "expand_timesteps True"),
    "an image as a condition": (
        lambda: tiny_wan(transformer=tiny_wan_transformer(image_dim=8)),
        "transformer: image_dim must be None, got 8",
    ),
    "an image beside the latents": (
        lambda: tiny_wan(transformer=tiny_wan_transformer(in_channels=8)),
        "transformer: out_channels must equal in_channels 8",
    ),
    "latents of another autoencoder": (
        lambda: tiny_wan(transformer=tiny_wan_transformer(in_channels=8, out_channels=8)),
        "in_channels must be the autoencoder's 4, got 8",
    ),
    "another transformer": (
        lambda: tiny_wan(transformer=tiny_sd3().transformer),
        "transformer must be a WanTransformer3DModel, got 'SD3Transformer2DModel'",
    ),
    "noise": (
        lambda: wan_with(prediction_type="epsilon"),
        "prediction_type must be 'flow_prediction', got 'epsilon'",
    ),
    "sigmas of another process": (
        lambda: wan_with(use_flow_sigmas=False),
        "use_flow_sigmas must be True, got False",
    ),
    "a last sigma above 0": (
        lambda: wan_with(final_sigmas_type="sigma_min"),
        "final_sigmas_type must be 'zero'",
    ),
    "another unit of time": (
        lambda: tiny_sd3(
            scheduler=library.FlowMatchEulerDiscreteScheduler(num_train_timesteps=500)
        ),
        "num_train_timesteps must be 1000, got 500",
    ),
    "rising sigmas": (
        lambda: tiny_sd3(scheduler=library.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)),
        "invert_sigmas must be False, got True",
    ),
    "another scheduler": (
        lambda: tiny_sd3(scheduler=library.DDIMScheduler()),
        "scheduler must be one of .*, got DDIMScheduler",
    ),
    "another class": (
        lambda: library.StableDiffusion3Img2ImgPipeline(**tiny_sd3().components),
        "_class_name must be one of .*, got 'StableDiffusion3Img2ImgPipeline'",
    ),
    "an encoder of images": (
        lambda: tiny_sd3(
            image_encoder=SiglipVisionModel(
                SiglipVisionConfig(
                    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
                )
            )
        ),
        "image_encoder .* is not supported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_what_is_drawn_and_is_not_read_is_refused_by_name(
    tmp_path: Path, case: str
):
    """When the base is imported, and when a policy is loaded."""
    make, message = REFUSED[case]
    save_pipeline(tmp_path / "model", make())
    base = DirectoryBase(source="directory", path="model")
    params = recipe("clips-wan", CLIP, base=base)
    with pytest.raises(ParameterError, match=f"policy.base .* cannot be loaded: .*{message}"):
        make_pipeline(params, tmp_path)
    with pytest.raises(ArtifactError, match=message):
        load(params, tmp_path / "model")


@pytest.mark.parametrize("file", ["model_index.json", "scheduler/scheduler_config.json"])
@pytest.mark.parametrize("make", [tiny_sd3, tiny_wan])
def test_what_this_version_of_the_library_does_not_know_is_refused_by_name(
    tmp_path: Path, file: str, make: Any
):
    """It would drop it with a warning at best."""
    save_pipeline(tmp_path / "model", make())
    path = tmp_path / "model" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), "a_setting": [1, 2]}))
    params = recipe("clips-wan", CLIP, base=DirectoryBase(source="directory", path="model"))
    with pytest.raises(ParameterError, match=r"a_setting \[1, 2\] .*is not supported"):
        make_pipeline(params, tmp_path)


@pytest.mark.parametrize("content", ["null", "[1]", "{}", '{"transformer": 3}'])
def test_an_index_of_another_shape_is_refused(tmp_path: Path, content: str):
    save_pipeline(tmp_path / "model", tiny_sd3())
    (tmp_path / "model/model_index.json").write_text(content)
    params = recipe("clips-wan", CLIP, base=DirectoryBase(source="directory", path="model"))
    with pytest.raises(ParameterError, match=r"policy.base .* cannot be loaded: "):
        make_pipeline(params, tmp_path)
    with pytest.raises(ArtifactError):
        load(params, tmp_path / "model")
    with pytest.raises(ArtifactError, match=r"model_index.json: must "):
        stored_condition_names(tmp_path / "model")


@pytest.mark.parametrize("make", [tiny_sd3, tiny_wan])
def test_a_whole_pipeline_is_imported(tmp_path: Path, make: Any):
    save_pipeline(tmp_path / "model", make())
    params = recipe("clips-wan", CLIP, base=DirectoryBase(source="directory", path="model"))
    assert make_pipeline(params, tmp_path).transformer.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("transformer", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
        ("text_encoder", "model"),
        ("text_encoder_3", "model"),
    ],
)
@pytest.mark.parametrize("problem", ["missing", "unexpected", "of another shape"])
def test_a_pipeline_whose_weights_are_not_those_of_its_configuration_is_refused(
    tmp_path: Path, part: str, file: str, problem: str
):
    """A missing tensor would be drawn at random, unseeded."""
    save_pipeline(tmp_path / "model", tiny_sd3())
    path = tmp_path / "model" / part / f"{file}.safetensors"
    weights = load_file(path)
    name = next(each for each in sorted(weights) if weights[each].dim() == 2)
    if problem == "missing":
        del weights[name]
    elif problem == "unexpected":
        weights["of_another_model.weight"] = torch.zeros(2)
    else:
        weights[name] = torch.zeros(3, 3)
    save_file(weights, path, metadata={"format": "pt"})
    params = recipe("images-sd35", IMAGE, base=DirectoryBase(source="directory", path="model"))
    with pytest.raises(ParameterError, match=r"policy.base .*cannot be loaded") as error:
        make_pipeline(params, tmp_path)
    assert "\n" not in str(error.value)
    if problem != "of another shape":  # which the libraries refuse in their own words
        assert f"the weights of {part} are not those of its config.json: 1 {problem}" in str(
            error.value
        )


@pytest.mark.parametrize(
    ("make", "canvas", "message"),
    [
        (tiny_sd3, IMAGE.model_copy(update={"height": 18}), "height must be a multiple of 4"),
        (tiny_sd3, IMAGE.model_copy(update={"frames": 5}), "frames must be 1 for images, got 5"),
        (tiny_wan, CLIP.model_copy(update={"frames": 4}), "frames must be 1, 3, 5, ..., got 4"),
        (tiny_wan, CLIP.model_copy(update={"width": 7}), "width must be a multiple of 4, got 7"),
    ],
)
def test_a_canvas_that_cannot_be_drawn_is_refused(
    tmp_path: Path, make: Any, canvas: Canvas, message: str
):
    save_pipeline(tmp_path, make())
    with pytest.raises(ParameterError, match=rf"params.yaml: policy\.canvas\.{message}"):
        load(recipe("clips-wan", canvas), tmp_path)
