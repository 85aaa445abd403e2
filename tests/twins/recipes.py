"""Tiny twins of recipes that need a GPU or a hub, made from the recipes themselves.

A twin keeps what a recipe says of classes, dtype, LoRA, guidance, densities, windows, samplers'
settings, judge and objective. Replaced are: where models come from (a directory of tiny ones, see
`models.py`), the device, vLLM (by transformers; tests/pipeline/test_vllm.py runs vLLM), and sizes:
the canvas, frames, prompts, groups, steps of text and of robots, batches and updates.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

from grpo.modalities.shared.images import join_prompt
from grpo.modalities.shared.warmup import WarmupSettings, warm_up
from grpo.params.recipes import read_content
from grpo.tasks.grounding import draw_scene
from tests.twins.models import config_of, save_twin

RECIPES = Path(__file__).parents[2] / "recipes"
IMPORTED = ("hub", "directory", "s3")
UPDATES = 2
MOST = {  # what a twin takes at most, wherever a recipe says it
    "rollouts_per_prompt": 2,
    "rollouts_per_batch": 6,
    "bootstrap_resamples": 50,
    "prompts_per_phase": 2,
    "tokens_per_microbatch": 512,
    "updates_per_checkpoint": 1,
    "updates_per_audit": UPDATES,
    "at_once": 2,
    "pixels": 56,
}
TRAIN_PROMPTS, EVAL_PROMPTS = 12, 2
TAG = ">>fin_Latn<< "  # of prompts whose tag is forced
FAMILIES, ROBOT_STEPS, TEXT_STEPS, GROUP, FRAMES, SIDE = 2, 3, 6, 4, 5, 32
# images-sd35 by E2PO on DiffusionNFT, as docs/methods/e2po.md writes it.
E2PO: dict[str, Any] = {
    "sampling": {
        "density": "matched",
        "stochastic": "one_per_prompt",
        "variants": {
            "count": 2,
            "similarity": 0.9,
            "tolerance": 0.02,
            "diversity": 1.0,
            "init": 0.01,
            "updates": 3,
            "learning_rate": 0.001,
            "share": 0.5,
        },
    },
    "objective": [{"diffusion_nft": {"dimensions": 65536}}],
}


def read(name: str) -> dict[str, Any]:
    """Returns a recipe's parameters with all that it extends."""
    return read_content(RECIPES / f"{name}.yaml")


def needing_a_twin() -> list[str]:
    """Returns the recipes that need a GPU or models from elsewhere."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    return [
        name
        for name in names
        if read(name)["machine"]["device"] == "cuda" or any(True for _ in sources(read(name)))
    ]


def sources(content: Any) -> Iterator[dict[str, Any]]:
    """Yields every place that models are imported from, to be changed."""
    if isinstance(content, dict):
        if content.get("source") in IMPORTED:
            yield content
        for each in content.values():
            yield from sources(each)
    elif isinstance(content, list):
        for each in content:
            yield from sources(each)


def make_twin(params: dict[str, Any], data: Path) -> dict[str, Any]:
    """Returns the parameters of a recipe's twin, and writes its models and prompts under `data`."""
    twin = deepcopy(params)
    tiny: dict[str, Any] = {}
    for number, source in enumerate(sources(twin)):
        content = config_of(source)
        directory = f"{Path(content['name']).name}-{number}"
        tiny[directory] = save_twin(content, data / directory)
        source.clear()
        source |= {"source": "directory", "path": directory}
    twin["machine"] |= {"device": "cpu", "threads": 1}
    _cut(twin)
    _cut_curricula(twin)
    twin["rounds"] = {f"{arm}-1": {"arm": arm, "start": "base", "phase": 1} for arm in twin["arms"]}
    match twin["policy"]["kind"]:
        case "tokens":
            _cut_texts(twin, data, tiny)
        case "denoising":
            _cut_canvas(twin, params["policy"]["canvas"], tiny)
        case "action_chunks":
            _cut_robots(twin)
        case "seq2seq":
            twin["policy"]["max_steps"] = TEXT_STEPS
        case "vision_language":
            _cut_scenes(twin, params["task"]["pixels"], data, tiny)
    if twin["task"]["kind"] == "jsonl":
        tag = TAG if twin["policy"].get("forces_tag") else ""
        _write_prompts(twin["task"], data, tag)
    return twin


def _cut(content: Any) -> None:
    """Lowers every number that MOST names."""
    if isinstance(content, list):
        for each in content:
            _cut(each)
    if isinstance(content, dict):
        for key, value in content.items():
            if key in MOST and isinstance(value, int):
                content[key] = min(value, MOST[key])
            _cut(value)


def _cut_curricula(twin: dict[str, Any]) -> None:
    """Makes two updates of small groups out of every arm's first round."""
    for arm in twin["arms"].values():
        iterations = min(arm["training"]["iterations_per_round"], UPDATES)
        arm["training"] = {
            **arm["training"],
            "iterations_per_round": iterations,
            "updates_per_iteration": UPDATES // iterations,
        }
        for step in arm["curriculum"]:
            for name, settings in step.items():
                if name == "fix_group_size":
                    settings["rollouts"] = min(settings["rollouts"], GROUP)


def _cut_texts(twin: dict[str, Any], data: Path, tiny: dict[str, Any]) -> None:
    policy = twin["policy"]
    policy["max_steps"] = TEXT_STEPS
    policy["sampler"] = "transformers"  # a tiny twin has heads that vLLM has no kernel for
    policy.pop("vllm", None)
    directory = data / policy["base"]["path"]
    _teach_answers(tiny[policy["base"]["path"]], directory)
    twin["profile"]["rollouts_per_prompt"] = GROUP


def _teach_answers(model: Any, directory: Path) -> None:
    """Trains a tiny chat model to write one of two answers, else no reward would ever differ."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    turn = [{"role": "user", "content": "x"}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    pairs = [(prompt, f"The answer is {number}") for number in (1, 2)]
    settings = WarmupSettings(updates=40, rows_per_update=2, learning_rate=0.003, seed=0)
    for _ in warm_up(model, tokenizer, pairs, settings):
        pass
    model.save_pretrained(directory)


def _cut_canvas(twin: dict[str, Any], real: dict[str, int], tiny: dict[str, Any]) -> None:
    """Divides the canvas, and with it the dimensions of a step and the positions of a batch."""
    pipeline = tiny[twin["policy"]["base"]["path"]]
    canvas = {
        "frames": min(real["frames"], FRAMES),  # more than one latent frame
        **{side: max(SIDE, real[side] // 16 // SIDE * SIDE) for side in ("height", "width")},
    }
    twin["policy"]["canvas"] = canvas
    before, after = (_dimensions(pipeline, each) for each in (real, canvas))
    for arm, original in zip(twin["arms"].values(), deepcopy(twin["arms"]).values()):
        arm["objective"] = [
            {name: {**settings, "dimensions": after} if "dimensions" in settings else settings}
            for link in original["objective"]
            for name, settings in link.items()
        ]
        assert all(
            settings.get("dimensions", before) == before
            for link in original["objective"]
            for settings in link.values()
        )
        patch = pipeline.transformer.config.patch_size
        area = patch**2 if isinstance(patch, int) else prod(patch)
        positions = after // pipeline.transformer.config.in_channels // area
        arm["training"]["tokens_per_microbatch"] = 3 * positions  # fewer rows than a group has
    twin["evaluation"]["sampling"]["num_steps"] = 4


def _dimensions(pipeline: Any, canvas: dict[str, int]) -> int:
    """Returns how many numbers a latent of a canvas has, by the pipeline's own factors."""
    channels: int = pipeline.transformer.config.in_channels
    if hasattr(pipeline, "vae_scale_factor"):
        return channels * canvas["height"] * canvas["width"] // pipeline.vae_scale_factor**2
    frames = (canvas["frames"] - 1) // pipeline.vae_scale_factor_temporal + 1
    area = canvas["height"] * canvas["width"] // pipeline.vae_scale_factor_spatial**2
    return channels * frames * area


def _cut_robots(twin: dict[str, Any]) -> None:
    families = twin["task"]["families"][:FAMILIES]
    twin["task"] |= {
        "families": families,
        "train_prompts": TRAIN_PROMPTS,
        "eval_prompts": EVAL_PROMPTS,
    }
    twin["policy"]["max_steps"] = ROBOT_STEPS
    warmup = twin["policy"]["base"]["warmup"]
    warmup |= {"demonstrations": dict.fromkeys(families, 1), "updates": 2, "rows_per_update": 4}


def _cut_scenes(twin: dict[str, Any], pixels: int, data: Path, tiny: dict[str, Any]) -> None:
    """Leaves the families that count, which are trained, and those of evaluation only."""
    families = {
        name: each
        for name, each in twin["task"]["families"].items()
        if each["question"] == "count" or each["pairs"] == "held_out"
    }
    twin["task"] |= {
        "families": families,
        "train_prompts": TRAIN_PROMPTS,
        "eval_prompts": EVAL_PROMPTS,
        "pixels": pixels,  # as the recipe says: scenes have as many shapes
        "instruction": "",
    }
    twin["policy"]["max_steps"] = TEXT_STEPS
    directory = twin["policy"]["base"]["path"]
    _teach_counts(tiny[directory], data / directory, pixels)


def _teach_counts(model: Any, directory: Path, pixels: int) -> None:
    """Trains a tiny model to write 1 or 2, else no reward would ever differ."""
    from transformers import AutoTokenizer

    from grpo.modalities.vision_language import bases
    from grpo.modalities.vision_language.reading import PromptReader, load_image_processor

    reader = PromptReader(
        AutoTokenizer.from_pretrained(directory),
        load_image_processor(directory),
        model.config,
        uses_chat_template=True,
    )
    prompt = join_prompt(draw_scene((), "filled", pixels), "x")
    settings = WarmupSettings(updates=12, rows_per_update=2, learning_rate=0.01, seed=0)
    for _ in bases.warm_up(model, reader, [(prompt, " 1"), (prompt, " 2")], settings):
        pass
    model.save_pretrained(directory)


def _write_prompts(task: dict[str, Any], data: Path, tag: str) -> None:
    for part, count in (("train", TRAIN_PROMPTS), ("eval", EVAL_PROMPTS)):
        rows = [
            json.dumps(
                {
                    "prompt": f"{tag}{part} picture {i}, {i % 2 + 1} of them",
                    "answer": str(i % 2 + 1),
                }
            )
            for i in range(count)
        ]
        (data / task[part]).parent.mkdir(parents=True, exist_ok=True)
        (data / task[part]).write_text("\n".join(rows) + "\n")
