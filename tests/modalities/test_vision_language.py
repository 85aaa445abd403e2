"""A vision-language policy samples from the density it scores with, for several classes."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image, ImageDraw
from transformers import Idefics3Processor, PaliGemmaProcessor, PreTrainedModel

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.modality import Lora, PairWarmup
from grpo.modalities.shared.directories import gather_trained, save_base, write_trained
from grpo.modalities.shared.images import join_prompt
from grpo.modalities.shared.models import add_lora
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.modalities.shared.packed import select_packed
from grpo.modalities.shared.recomputation import recompute_blocks
from grpo.modalities.shared.text_modality import Decoding
from grpo.modalities.shared.warmup import WarmupSettings
from grpo.modalities.vision_language import forward
from grpo.modalities.vision_language.bases import (
    make_base_policy,
    make_fresh,
    own_logits,
    require_sampling,
    warm_up,
)
from grpo.modalities.vision_language.modality import ScratchBase, VisionLanguagePolicyParams
from grpo.modalities.vision_language.pictures import GIVEN, TRUE, draw_objects
from grpo.modalities.vision_language.policy import (
    VisionLanguagePolicy,
    load_vision_language_policy,
)
from grpo.modalities.vision_language.reading import PromptReader
from grpo.registry.export import merge_adapters, write_model
from grpo.schema import Machine
from tests.modalities.test_seq2seq import count_flops
from tests.modalities.tiny import seeded

WORDS = ["where is the red ring", *(str(number) for number in range(400))]
SIDE = 32
VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
SIGLIP = {**VISION, "intermediate_size": 32, "image_size": SIDE, "patch_size": 8}
WARMUP = PairWarmup(prompts=4, updates=1, rows_per_update=1, learning_rate=0.1)
BASES: dict[str, dict[str, Any]] = {
    "paligemma": {
        "architecture": "PaliGemmaForConditionalGeneration",
        "config": {"projection_dim": 16, "hidden_size": 16},
        "vision_config": {**SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        "text_config": {**TEXT, "model_type": "gemma"},
    },
    "qwen": {
        "architecture": "Qwen2_5_VLForConditionalGeneration",
        "config": {},
        "vision_config": {
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": 16,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        "text_config": {
            **{key: value for key, value in TEXT.items() if key != "head_dim"},
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        },
    },
    "smolvlm": {
        "architecture": "SmolVLMForConditionalGeneration",
        "config": {"scale_factor": 2},
        "vision_config": SIGLIP,
        "text_config": {**TEXT, "model_type": "llama"},
    },
    "idefics3": {
        "architecture": "Idefics3ForConditionalGeneration",
        "config": {"scale_factor": 2},
        "vision_config": SIGLIP,
        "text_config": {**TEXT, "model_type": "llama"},
    },
}
SIZES = [3, 2, 4]


def png(seed: int, width: int = SIDE, height: int = SIDE) -> bytes:
    image = Image.new("RGB", (width, height), (250, 245, 240))
    corner = 3 * seed + 2
    ImageDraw.Draw(image).rectangle((corner, 4, corner + 9, 15), fill=(200, 30, 20 * seed))
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


PROMPTS = [
    join_prompt(png(0), "where is"),
    join_prompt(png(1), "where is the red ring"),
    join_prompt(png(2), "the ring"),
]


class Params:
    """The sections of the parameters that the modality reads."""

    seed = 0
    machine = Machine(device="cpu", dtype="float32", threads=1, compile=False)
    task = None

    def __init__(self, kind: str, **changes: Any) -> None:
        self.base = ScratchBase(source="scratch", warmup=WARMUP, **BASES[kind])
        settings: dict[str, Any] = {
            "kind": "vision_language",
            "base": self.base,
            "lora": None,
            "recompute": False,
            "prompt_format": "plain",
            "max_steps": 6,
        }
        self.policy = VisionLanguagePolicyParams(**{**settings, **changes})


def made(kind: str) -> tuple[PreTrainedModel, PromptReader]:
    """Returns a tiny model with sharp random weights, and its reader."""
    params = Params(kind)
    model, reader = make_fresh(params, params.base, WORDS)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # the classes start with a vision tower that hardly sees
        for each in model.parameters():
            if each.ndim > 1:
                each.copy_(0.3 * torch.randn(each.shape, generator=generator))
    return model, reader


QUICK = ("paligemma", "qwen")  # in every run of the tests; the others are in long runs


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in BASES]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def policy_of(kind: str, *, temperature: float = 1.0, max_steps: int = 6) -> VisionLanguagePolicy:
    return VisionLanguagePolicy(
        *made(kind), decoding=Decoding(temperature=temperature, max_steps=max_steps)
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_log_probs_recomputed_in_training_equal_those_of_sampling(kind: str, temperature: float):
    """U25, U27: same temperature, caches or none, padding or none."""
    policy = policy_of(kind, temperature=temperature)
    trajectory, sampled = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    with torch.no_grad():
        scored = policy.log_prob(trajectory)
    torch.testing.assert_close(scored, sampled, atol=2e-5, rtol=1e-5)


def test_log_probs_are_the_negative_loss_of_the_models_own_labels(kind: str):
    """Its own forward method with token types: attention, positions and image features."""
    policy = policy_of(kind)
    trajectory, logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    model: Any = policy.model
    assert not (trajectory.tokens == model.config.image_token_id).any()
    for row, group in enumerate(trajectory.group.tolist()):
        prompt, _, images = policy.encode([PROMPTS[group]])
        answer = trajectory.tokens[row][trajectory.mask[row]][None]
        joined = torch.cat([prompt, answer], dim=1)
        is_answer = torch.arange(joined.shape[1])[None] >= prompt.shape[1]
        types: dict[str, Any] = {}
        if kind == "paligemma":
            types["token_type_ids"] = is_answer.int()
        if kind == "qwen":
            types["mm_token_type_ids"] = (joined == model.config.image_token_id).int()
        with torch.no_grad():
            loss = model(
                input_ids=joined,
                attention_mask=torch.ones_like(joined),
                labels=joined.where(is_answer, torch.tensor(-100)),
                **types,
                **policy.reader.read_images(images),
            ).loss
        expected = -loss.item() * answer.shape[1]
        assert float(logp[row].sum()) == pytest.approx(expected, abs=2e-4)


def test_the_log_probs_depend_on_the_image(kind: str):
    policy = policy_of(kind)
    trajectory, logp = policy.sample(PROMPTS[:1], group_sizes=[4], generator=seeded())
    other = replace(trajectory, images=(png(3),))
    with torch.no_grad():
        assert float((policy.log_prob(other) - logp).abs().max()) > 1e-3


def test_an_answer_sees_its_whole_prompt_but_not_its_own_future(kind: str):
    """PaliGemma's trap: token types of 0 make attention bidirectional over the answer."""
    policy = policy_of(kind)
    trajectory, _ = policy.sample(PROMPTS[:1], group_sizes=[1], generator=seeded())
    tokens = trajectory.tokens.clone()
    tokens[:, -1] = tokens[:, -1] % 300 + 10
    assert tokens.shape[1] > 2
    changed = replace(trajectory, tokens=tokens)
    with torch.no_grad():
        one, other = policy.log_prob(trajectory), policy.log_prob(changed)
    torch.testing.assert_close(one[:, :-1], other[:, :-1])
    assert not torch.equal(one[:, -1], other[:, -1])


def gradients(policy: VisionLanguagePolicy, logp: torch.Tensor) -> list[torch.Tensor | None]:
    weights = [each for each in policy.model.parameters() if each.requires_grad]
    return list(torch.autograd.grad(logp.sum(), weights, allow_unused=True))


def test_the_gradient_of_the_image_is_that_of_the_whole_group(kind: str):
    """One pass over a prompt and its image for its group, against one pass per rollout."""
    policy = policy_of(kind)
    trajectory, _ = policy.sample(PROMPTS[:1], group_sizes=[4], generator=seeded())
    shared = gradients(policy, policy.log_prob(trajectory))
    apart = [None if each is None else torch.zeros_like(each) for each in shared]
    for row in range(4):
        found = gradients(policy, policy.log_prob(trajectory.select(torch.tensor([row]), 6)))
        apart = [one if one is None else one + two for one, two in zip(apart, found, strict=True)]
    names = [name for name, each in policy.model.named_parameters() if each.requires_grad]
    moved = [name for name, each in zip(names, shared) if each is not None and each.abs().max() > 0]
    assert any("vision" in name or "visual" in name for name in moved)
    for name, one, other in zip(names, shared, apart, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3, msg=name)


def test_the_vision_tower_reads_each_image_once(kind: str):
    policy = policy_of(kind)
    trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    _ = policy.log_prob(trajectory)  # counts one image beforehand
    read: list[int] = []
    encode = policy.passes._encode

    def counted(images: Any) -> torch.Tensor:
        read.append(len(images.get("image_grid_thw", images["pixel_values"])))
        return encode(images)

    policy.passes._encode = counted  # type: ignore[method-assign]
    _ = policy.log_prob(trajectory)
    assert read == [3]
    few = trajectory.select(torch.tensor([0, 1, 3]), 6)
    read.clear()
    _ = policy.log_prob(few)
    assert read == [2]


def test_recomputation_leaves_log_probs_and_gradients_as_they_are(kind: str):
    plain, again = policy_of(kind), policy_of(kind)
    recompute_blocks(again.model)
    trajectory, _ = plain.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    found = []
    for policy in (plain, again):
        logp = policy.log_prob(trajectory)
        found.append([logp, *gradients(policy, logp)])
    for one, other in zip(*found, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other)


def test_steps_that_are_not_needed_are_zero_and_leave_the_others_as_they_are(kind: str):
    policy = policy_of(kind)
    trajectory, logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    needed = torch.zeros_like(trajectory.mask)
    needed[:, 1::2] = True
    with torch.no_grad():
        found = policy.log_prob(trajectory, needed)
    wanted = needed & trajectory.mask
    torch.testing.assert_close(found, torch.where(wanted, logp, 0.0), atol=2e-5, rtol=1e-5)


def test_the_first_token_follows_the_models_distribution():
    """8000 draws, every token within 4.5 standard errors of its probability."""
    policy = policy_of("paligemma", temperature=0.8, max_steps=1)
    trajectory, _ = policy.sample(PROMPTS[:1], group_sizes=[8000], generator=seeded())
    with torch.no_grad():
        logits = own_logits(policy.model, policy, PROMPTS[0], torch.tensor([5]))[0] / 0.8
    chance = logits.softmax(0)
    counts = torch.bincount(trajectory.tokens[:, 0], minlength=len(chance)) / 8000
    error = (chance * (1 - chance) / 8000).sqrt()
    assert ((counts - chance).abs() <= 4.5 * error + 1e-4).all()


def test_greedy_takes_the_most_likely_token_and_has_no_density(kind: str):
    policy = policy_of(kind, temperature=0.0)
    trajectory, _ = policy.sample(PROMPTS, group_sizes=[1, 1, 1], generator=seeded())
    with pytest.raises(ValueError, match="temperature > 0"):
        policy.log_prob(trajectory)
    for row, prompt in enumerate(PROMPTS):
        tokens = trajectory.tokens[row][trajectory.mask[row]]
        with torch.no_grad():
            logits = own_logits(policy.model, policy, prompt, tokens)
        assert torch.equal(logits.argmax(1), tokens)


def test_packed_rollouts_come_back_and_score_the_same(kind: str):
    policy = policy_of(kind)
    trajectory, logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    tensors = trajectory.pack(logp)
    restored, behavior = policy.unpack(tensors, trajectory.group)
    torch.testing.assert_close(behavior, logp)
    assert restored.images == trajectory.images
    kept = torch.tensor([False, False, False, True, False, True, False, False, True])
    few, few_logp = policy.unpack(
        select_packed(policy.layout, tensors, trajectory.group, kept), trajectory.group[kept]
    )
    assert few.images == trajectory.images[1:]
    with torch.no_grad():
        torch.testing.assert_close(policy.log_prob(restored), logp, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(policy.log_prob(few), few_logp, atol=2e-5, rtol=1e-5)
    broken = {**tensors, "tokens": tensors["tokens"].clone()}
    broken["tokens"][0] = 10_000
    with pytest.raises(ArtifactError, match="tokens of row 0, entry 0"):
        policy.unpack(broken, trajectory.group)
    broken = {**tensors, "image_bytes": tensors["image_bytes"].int()}
    broken["image_bytes"][1] = 256
    with pytest.raises(ArtifactError, match="image_bytes of row 0, entry 1"):
        policy.unpack(broken, trajectory.group)


@pytest.mark.parametrize("trained", ["all", "adapters", "recomputed"])
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_torch_counts(kind: str, trained: str, backward: bool):
    policy = policy_of(kind)
    if trained == "adapters":
        lora = Lora(rank=2, alpha=4, dropout=0.0, target_modules=["q_proj", "v_proj"])
        add_lora(policy.model, lora, seed=0)
        policy = VisionLanguagePolicy(policy.model, policy.reader, decoding=policy.decoding)
    if trained == "recomputed":
        recompute_blocks(policy.model)
    trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    trajectory = replace(trajectory, mask=torch.ones_like(trajectory.mask))
    with torch.set_grad_enabled(backward):
        _ = policy.log_prob(trajectory)  # counts small passes beforehand
    before = policy.cost
    counter = count_flops()
    with counter, torch.set_grad_enabled(backward):
        logp = policy.log_prob(trajectory)
        if backward:
            gradients(policy, logp)
    assert policy.cost.flops - before.flops == counter.get_total_flops()


def test_sampling_costs_what_torch_counts(kind: str):
    policy = policy_of(kind)
    policy.sample(PROMPTS, group_sizes=[1, 1, 1], generator=seeded())  # counts small passes
    before, counter = policy.cost, count_flops()
    with counter:
        trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    assert policy.cost.flops - before.flops == counter.get_total_flops()
    assert policy.cost.sampled_steps - before.sampled_steps == int(trajectory.mask.sum())


def test_images_of_different_sizes_are_read_together():
    policy = policy_of("qwen")
    prompts = [join_prompt(png(0, 48, 32), "where is"), join_prompt(png(1, 32, 64), "the ring")]
    _ = policy.sample(prompts, group_sizes=[1, 1], generator=seeded())
    before, counter = policy.cost, count_flops()
    with counter:
        trajectory, logp = policy.sample(prompts, group_sizes=[2, 2], generator=seeded())
    assert policy.cost.flops - before.flops == counter.get_total_flops()
    for row, prompt in enumerate([prompts[0], prompts[0], prompts[1], prompts[1]]):
        tokens = trajectory.tokens[row][trajectory.mask[row]]
        with torch.no_grad():
            own = own_logits(policy.model, policy, prompt, tokens).log_softmax(1)
        expected = own.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logp[row][trajectory.mask[row]], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("splits", [False, True])
def test_prompts_and_pixels_are_those_of_the_processor_of_idefics3(splits: bool):
    """Of an image of 48 by 80 pixels, which is split into tiles of 32."""
    model, reader = made("idefics3")
    marks = ["<end_of_utterance>", *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2, 3))]
    reader.tokenizer.add_tokens(marks, special_tokens=True)
    reader.image_processor.do_image_splitting = splits
    reader.image_processor.size = {"longest_edge": 96}
    image = png(1, 80, 48)
    tokens, _ = reader.read_prompt(join_prompt(image, "where is"))
    whole = Idefics3Processor(reader.image_processor, reader.tokenizer, image_seq_len=4)
    opened = Image.open(io.BytesIO(image))
    expected = whole(images=[[opened]], text=["<image>where is"], return_tensors="pt")
    assert tokens == expected["input_ids"][0].tolist()
    found = reader.read_images([image])
    assert (found["pixel_values"].shape[1] > 1) == splits
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    features = model.model.get_image_features(**found, return_dict=True).pooler_output
    assert len(torch.cat([*features])) == tokens.count(model.config.image_token_id)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of transformers
def test_prompts_and_pixels_are_those_of_the_processor_of_paligemma():
    _, reader = made("paligemma")
    reader.image_processor.image_seq_length = 16
    tokens, image = reader.read_prompt(PROMPTS[1])
    whole = PaliGemmaProcessor(reader.image_processor, reader.tokenizer)
    expected = whole(
        images=[Image.open(io.BytesIO(image))],
        text=["<image>where is the red ring"],
        return_tensors="pt",
    )
    assert tokens == expected["input_ids"][0].tolist()
    assert torch.equal(reader.read_images([image])["pixel_values"], expected["pixel_values"])


def test_images_in_fewer_tiles_are_read_together_with_others():
    policy = policy_of("idefics3")
    policy.reader.tokenizer.add_tokens(
        [f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2, 3)], special_tokens=True
    )
    policy.model.resize_token_embeddings(len(policy.reader.tokenizer))
    policy = VisionLanguagePolicy(policy.model, policy.reader, decoding=policy.decoding)
    policy.reader.image_processor.do_image_splitting = True
    policy.reader.image_processor.size = {"longest_edge": 96}
    images = [png(0, 80, 48), png(1, 32, 32), png(2, 48, 90)]
    prompts = [join_prompt(image, "where is") for image in images]
    trajectory, sampled = policy.sample(prompts, group_sizes=[2, 2, 2], generator=seeded())
    shapes = {tuple(policy.reader.read_images([image])["pixel_values"].shape) for image in images}
    assert len(shapes) > 1
    with torch.no_grad():
        torch.testing.assert_close(policy.log_prob(trajectory), sampled, atol=2e-5, rtol=1e-5)
    alone, _ = policy.sample(prompts[1:2], group_sizes=[1], generator=seeded())
    tokens = alone.tokens[0][alone.mask[0]]
    with torch.no_grad():
        own = own_logits(policy.model, policy, prompts[1], tokens).log_softmax(1)
        found = policy.log_prob(alone)[0]
    torch.testing.assert_close(found[alone.mask[0]], own.gather(1, tokens[:, None])[:, 0])


def test_more_positions_than_the_model_has_are_refused():
    policy = policy_of("paligemma", max_steps=120)
    with pytest.raises(ParameterError, match="the model has 128"):
        policy.sample(PROMPTS[:1], group_sizes=[1], generator=seeded())


def test_models_that_decode_are_accepted_and_others_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    model, reader = made(kind)
    require_sampling(model, reader)

    def causal(self: Any, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return forward.score_bias(mask, 1, dtype).expand(-1, -1, mask.shape[1], -1)

    if kind != "paligemma":  # whose prompts see themselves as a whole
        monkeypatch.setattr(forward.VisionLanguagePasses, "_prompt_bias", causal)
        with pytest.raises(ArtifactError, match="cannot be sampled as a vision-language model"):
            require_sampling(model, reader)


def test_images_and_questions_that_cannot_be_read_are_named():
    policy = policy_of("paligemma")
    with pytest.raises(ParameterError, match="images that Pillow can read"):
        policy.encode([join_prompt(b"no image", "where")])
    with pytest.raises(ParameterError, match="questions without <image>"):
        policy.encode([join_prompt(png(0), "where <image>")])


def test_a_base_is_stored_and_loaded_with_its_processor(kind: str, tmp_path: Path):
    policy = policy_of(kind)
    trajectory, logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    save_base(tmp_path, policy.model, policy.reader)
    loaded = load_vision_language_policy(
        Params(kind), base=tmp_path, directory=tmp_path, decoding=policy.decoding
    )
    again, other = loaded.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    assert torch.equal(again.tokens, trajectory.tokens)
    torch.testing.assert_close(other, logp)
    assert loaded.decode(again) == policy.decode(trajectory)


def test_the_loss_of_a_warm_up_is_the_mean_over_the_tokens_of_its_answers(kind: str):
    """Rows are computed in parts of similar lengths; the model's own pass takes each alone."""
    policy = policy_of(kind)
    model, reader = policy.model, policy.reader
    texts = ["2", "the red ring", "where", "ring ring"]
    pairs = [(PROMPTS[row % 3], text) for row, text in enumerate(texts)]
    nats, count = 0.0, 0
    with torch.no_grad():
        for prompt, text in pairs:
            answer = reader.tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens = torch.tensor([*answer, reader.tokenizer.eos_token_id])
            logp = own_logits(model, policy, prompt, tokens).log_softmax(dim=1)
            nats -= float(logp.gather(1, tokens[:, None]).sum())
            count += len(tokens)
    settings = WarmupSettings(updates=1, rows_per_update=4, learning_rate=1e-3, seed=0)
    (update,) = warm_up(model, reader, pairs, settings)
    assert update.loss == pytest.approx(nats / count, rel=1e-5)
    assert update.cost.trained_steps == count


def test_a_warm_up_learns_where_a_shape_is():
    """Without a look at the image, six places cost log 6 = 1.8 nats each."""
    model, reader = make_fresh(Params("paligemma"), Params("paligemma").base, WORDS)
    table = pd.DataFrame({"place": range(6)})
    pairs = [(join_prompt(png(place), "where is"), str(place)) for place in table["place"]]
    settings = WarmupSettings(updates=80, rows_per_update=6, learning_rate=1e-2, seed=0)
    updates = list(warm_up(model, reader, pairs, settings))
    assert updates[0].loss > 2.0
    assert updates[-1].loss < 0.3
    policy = VisionLanguagePolicy(model, reader, decoding=Decoding(temperature=0.0, max_steps=3))
    trajectory, _ = policy.sample(
        [prompt for prompt, _ in pairs], group_sizes=[1] * 6, generator=seeded()
    )
    assert policy.decode(trajectory) == [answer for _, answer in pairs]


def test_the_picture_shows_the_boxes_of_answer_and_rollout():
    """The image is 32 pixels wide and enlarged six times; a box's outline is within it."""
    drawn = draw_objects(png(0), "4 4 20 20", "2 24 10 30")
    image = Image.open(io.BytesIO(drawn))
    assert image.size == (192, 192)
    seen: dict[Any, list[tuple[int, int]]] = {TRUE: [], GIVEN: []}
    for x in range(192):
        for y in range(192):
            if (color := image.getpixel((x, y))) in seen:
                seen[color].append((x, y))
    for color, (left, top, right, bottom) in ((TRUE, (4, 4, 20, 20)), (GIVEN, (2, 24, 10, 30))):
        xs, ys = zip(*seen[color])
        assert (min(xs), max(xs) + 1) == (6 * left, 6 * right)
        assert (min(ys), max(ys) + 1) == (6 * top, 6 * bottom)


@pytest.mark.parametrize("text", ["", "three", "9 9 4 4", "5 5 ; 6"])
def test_a_rollout_without_boxes_leaves_the_answer_alone(text: str):
    assert draw_objects(png(0), "4 4 20 20", text) == draw_objects(png(0), "4 4 20 20", "")


@pytest.mark.parametrize("text", ["10 10 10.1 20", "10 10 20 10.1", "0 0 0.01 0.01"])
def test_a_box_that_is_thinner_than_a_pixel_is_drawn(text: str):
    assert draw_objects(png(0), "4 4 20 20", text) != draw_objects(png(0), "4 4 20 20", "")


CHAT = (
    "{% for message in messages %}User: {% for each in message['content'] %}"
    "{% if each['type'] == 'image' %}<vision_start> <image> <vision_end>"
    "{% else %}{{ ' ' + each['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} Assistant:{% endif %}"
)


def save_model(kind: str, directory: Path, *, template: str | None = None) -> PreTrainedModel:
    """Writes a tiny model as `save_pretrained` does."""
    model, reader = made(kind)
    reader.tokenizer.chat_template = template
    model.save_pretrained(directory)
    reader.save_pretrained(directory)
    return model


def imported(kind: str, **changes: Any) -> Params:
    return Params(kind, base={"source": "directory", "path": "tiny"}, **changes)


def test_a_directory_is_imported_and_samples_the_same(kind: str, tmp_path: Path):
    model = save_model(kind, tmp_path / "tiny")
    base = make_base_policy(imported(kind), tmp_path)
    assert base.num_updates == 0
    base.save(tmp_path / "base")
    decoding = Decoding(temperature=1.0, max_steps=6)
    loaded = load_vision_language_policy(
        imported(kind), base=tmp_path / "base", directory=tmp_path / "base", decoding=decoding
    )
    for name, weight in model.named_parameters():
        assert torch.equal(weight, dict(loaded.model.named_parameters())[name]), name
    _, expected = policy_of(kind).sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    _, found = loaded.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    torch.testing.assert_close(found, expected)


def test_a_chat_template_frames_image_and_question(tmp_path: Path):
    save_model("qwen", tmp_path / "tiny", template=CHAT)
    params = imported("qwen", prompt_format="chat")
    make_base_policy(params, tmp_path).save(tmp_path / "base")
    policy = load_vision_language_policy(
        params,
        base=tmp_path / "base",
        directory=tmp_path / "base",
        decoding=Decoding(temperature=1.0, max_steps=6),
    )
    tokens, _ = policy.reader.read_prompt(PROMPTS[0])
    known = policy.reader.tokenizer
    words = known.convert_ids_to_tokens(tokens)
    assert words == [
        "<unk>",
        "<vision_start>",
        *["<image>"] * 4,
        "<vision_end>",
        "where",
        "is",
        "<unk>",
    ]
    trajectory, sampled = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    with torch.no_grad():
        torch.testing.assert_close(policy.log_prob(trajectory), sampled, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'][1]['text'] }}", "<image>"])
def test_a_chat_template_without_image_or_question_is_refused(template: str | None, tmp_path: Path):
    save_model("qwen", tmp_path / "tiny", template=template)
    with pytest.raises(ParameterError, match=r"policy\.prompt_format chat"):
        make_base_policy(imported("qwen", prompt_format="chat"), tmp_path)


def test_classes_of_other_families_and_unknown_keys_are_refused():
    params = Params("paligemma")
    for changes, said in (
        ({"architecture": "LlavaForConditionalGeneration"}, "must be a class of a model of type"),
        ({"architecture": "NoSuchClass"}, "must be a class of a model of type"),
        ({"config": {"projection_dims": 16}}, "config.projection_dims is unknown"),
        ({"vision_config": {"patch_sizes": 8}}, "vision_config.patch_sizes is unknown"),
        ({"text_config": {"hidden_sizes": 8}}, "text_config.hidden_sizes is unknown"),
    ):
        merged = {**BASES["paligemma"]}
        for key, value in changes.items():
            merged[key] = {**merged[key], **value} if isinstance(value, dict) else value
        base = ScratchBase(source="scratch", warmup=WARMUP, **merged)
        with pytest.raises(ParameterError, match=said):
            make_fresh(params, base, WORDS)


def test_the_adapters_of_a_round_come_back_with_its_base(kind: str, tmp_path: Path):
    save_model(kind, tmp_path / "tiny")
    lora = Lora(rank=2, alpha=4, dropout=0.0, target_modules=["q_proj", "v_proj"])
    if kind == "qwen":  # whose vision tower has other names
        lora = lora.model_copy(update={"target_modules": ["qkv", "q_proj"]})
    params, base, trained = imported(kind, lora=lora), tmp_path / "base", tmp_path / "round"
    make_base_policy(params, tmp_path).save(base)
    decoding = Decoding(temperature=1.0, max_steps=6)
    policy = load_vision_language_policy(params, base=base, directory=base, decoding=decoding)
    trajectory, before = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    optimizer = PreciseAdamW(policy.model.parameters(), lr=0.1)
    for _ in range(2):  # B of an adapter starts at 0, so A moves in the second update
        (-policy.log_prob(trajectory).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    write_trained(trained, gather_trained(policy.model, optimizer))
    loaded = load_vision_language_policy(params, base=base, directory=trained, decoding=decoding)
    names = {name for name, each in loaded.model.named_parameters() if each.requires_grad}
    assert all("lora" in name for name in names)
    assert any("vision" in name or "visual" in name for name in names)
    with torch.no_grad():
        after = policy.log_prob(trajectory)
        assert torch.equal(loaded.log_prob(trajectory), after)
    assert not torch.allclose(after, before, atol=1e-2)

    bare = imported(kind)
    exported = load_vision_language_policy(bare, base=base, directory=base, decoding=decoding)
    merge_adapters(policy.model, exported.model)
    out = tmp_path / "exported"
    write_model(out, base, exported.model)
    again = load_vision_language_policy(bare, base=out, directory=out, decoding=decoding)
    with torch.no_grad():
        torch.testing.assert_close(again.log_prob(trajectory), after, rtol=0, atol=1e-4)
