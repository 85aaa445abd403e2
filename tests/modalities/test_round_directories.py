"""A round's directory: what training changed, and no copies; with its base it is the policy."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.action_chunks.bases import make_action_model
from grpo.modalities.action_chunks.modality import ChunkDecoding
from grpo.modalities.action_chunks.model import save_action_model
from grpo.modalities.denoising.pipelines import save_pipeline
from grpo.modalities.modality import Lora
from grpo.modalities.shared.directories import (
    PolicyState,
    gather_trained,
    save_base,
    save_trained,
    trainable,
    whole_policy,
    write_state,
)
from grpo.modalities.tokens.policy import Decoding
from grpo.modalities.vision_language.bases import make_base_policy
from grpo.params.parameters import Parameters, read_params
from grpo.registry.export import export_policy, merge_adapters, write_model
from grpo.wiring.policies import load_policy, make_optimizer
from tests.modalities.lora_cases import lora_cases
from tests.modalities.test_chunk_builds import LORA, changed, logits_of
from tests.modalities.test_pipelines import MADE, recipe
from tests.modalities.test_seq2seq import policy_of as translator
from tests.modalities.test_vision_language import PROMPTS as QUESTIONS
from tests.modalities.test_vision_language import imported, save_model
from tests.modalities.tiny import seeded, tiny_policy
from tests.modalities.tiny_denoiser import tiny_decoding

ROOT = Path(__file__).parents[2]
DECODING = Decoding(temperature=1.0, max_steps=4)
HEADERS = 8192  # bytes of state.json and of safetensors' headers, beside
HEADER = 256  # for every tensor
LIBRARY: dict[str, Any] = {"tokens": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}
Case = tuple[Parameters, Any, Callable[[Any], torch.Tensor]]


def adapters(*targets: str) -> Lora:
    return Lora(rank=2, alpha=4, dropout=0.0, target_modules=list(targets))


def tokens(base: Path, *, lora: bool) -> Case:
    policy = tiny_policy()
    save_base(base, policy.model, policy.tokenizer)
    params = read_params(ROOT / "params.yaml")
    update = {"lora": adapters("q_proj") if lora else None}
    params = params.model_copy(update={"policy": params.policy.model_copy(update=update)})
    trajectory, _ = policy.sample(["a=", "b="], group_sizes=[2, 2], generator=seeded())
    return params, DECODING, lambda each: each.log_prob(trajectory)


def seq2seq(base: Path, *, lora: bool) -> Case:
    policy = translator("m2m100")
    save_base(base, policy.model, policy.tokenizer)
    params = read_params(ROOT / "recipes" / "translation.yaml")
    update = {"lora": adapters("q_proj") if lora else None}
    params = params.model_copy(update={"policy": params.policy.model_copy(update=update)})
    trajectory, _ = policy.sample(["one", "two"], group_sizes=[2, 2], generator=seeded())
    return params, DECODING, lambda each: each.log_prob(trajectory)


def vision_language(base: Path, *, lora: bool) -> Case:
    save_model("paligemma", base.parent / "tiny")
    make_base_policy(imported("paligemma"), base.parent).save(base)
    params = read_params(ROOT / "recipes" / "grounding.yaml")
    update = {"lora": adapters("q_proj") if lora else None}
    params = params.model_copy(update={"policy": params.policy.model_copy(update=update)})
    policy = load_policy(params, base=base, directory=base, draws=DECODING)
    trajectory, _ = policy.sample(QUESTIONS, group_sizes=[2, 1, 1], generator=seeded())
    return params, DECODING, lambda each: each.log_prob(trajectory)


def denoising(name: str) -> Callable[..., Case]:
    def make(base: Path, *, lora: bool) -> Case:
        pipeline, canvas = MADE[name]
        params = recipe(name, canvas, **({} if lora else {"lora": None}))
        save_pipeline(base, pipeline())
        write_state(base, PolicyState(name="base"))
        decoding = tiny_decoding(guidance=2.0)
        policy = load_policy(params, base=base, directory=base, draws=decoding)
        trajectory, _ = policy.sample(["2A"], group_sizes=[2], generator=seeded())
        return params, decoding, lambda each: each.log_prob(trajectory)

    return make


def action_chunks(base: Path, *, lora: bool) -> Case:
    params = changed(base.parent, lora=LORA if lora else None)
    model, tokenizer = make_action_model(params, base.parent)
    save_action_model(base, model, tokenizer)
    write_state(base, PolicyState(name="base"))
    return params, ChunkDecoding(temperature=1.0, max_steps=4), logits_of


CASES: dict[str, Callable[..., Case]] = {
    "tokens": tokens,
    "seq2seq": seq2seq,
    "vision_language": vision_language,
    "images": denoising("images-sd35"),
    "clips": denoising("clips-wan"),
    "action_chunks": action_chunks,
}


@pytest.mark.parametrize(
    ("kind", "lora"),
    lora_cases(
        {
            "tokens": "lora",
            "seq2seq": "full",
            "vision_language": "lora",
            "images": "full",
            "clips": None,
            "action_chunks": "full",
        }
    ),
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_round_stores_what_training_changed_and_is_the_policy_with_its_base(
    tmp_path: Path, kind: str, lora: bool
):
    base, out = tmp_path / "base", tmp_path / "round-1"
    params, draws, score = CASES[kind](base, lora=lora)
    policy = load_policy(params, base=base, directory=base, draws=draws)
    fresh = score(policy).detach()
    arm = next(iter(params.arms.values()))
    training = arm.training.model_copy(update={"learning_rate": 0.05})
    optimizer = make_optimizer(policy.model, training)
    for index, each in enumerate(trainable(policy.model).values()):
        (each * torch.randn(each.shape, generator=seeded(index)).to(each.dtype)).sum().backward()
    optimizer.step()
    trained = gather_trained(policy.model, optimizer)
    save_trained(out, trained, PolicyState(name="round-1", arm="a"))

    files = [each for each in out.rglob("*") if each.is_file()]
    weights_name = next(iter(trained))
    stored = [each for tensors in trained.values() for each in tensors.values()]
    tensors = sum(each.nbytes for each in stored)
    assert len(files) == 3
    assert sum(each.stat().st_size for each in files) <= tensors + HEADERS + HEADER * len(stored)
    assert set(trainable(policy.model)) <= set(trained[weights_name])

    again = load_policy(params, base=base, directory=out, draws=draws)
    with torch.no_grad():
        assert torch.equal(score(again), score(policy))
        assert not torch.equal(score(again), fresh)

    next(each for each in files if each.name == Path(weights_name).name).unlink()
    with pytest.raises(ArtifactError, match=r"round-1/.*safetensors: no such file"):
        load_policy(params, base=base, directory=out, draws=draws)


@pytest.mark.parametrize(
    ("kind", "lora"),
    lora_cases(
        {
            "tokens": "full",
            "seq2seq": "lora",
            "vision_language": "lora",
            "images": "full",
            "clips": None,
        }
    ),
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_exported_policy_is_a_base_of_its_own(tmp_path: Path, kind: str, lora: bool):
    base, out = tmp_path / "base", tmp_path / "exported"
    params, draws, score = CASES[kind](base, lora=lora)
    bare = params.model_copy(update={"policy": params.policy.model_copy(update={"lora": None})})
    trained = load_policy(params, base=base, directory=base, draws=draws)
    fresh = score(trained).detach()
    with torch.no_grad():
        for index, each in enumerate(trainable(trained.model).values()):
            each += 0.1 * torch.randn(each.shape, generator=seeded(index))
    model = trained.model
    if lora:
        model = load_policy(bare, base=base, directory=base, draws=draws).model
        merge_adapters(trained.model, model)
    write_model(out, base, model)
    exported = load_policy(bare, base=out, directory=out, draws=draws)
    with torch.no_grad():
        torch.testing.assert_close(score(exported), score(trained), rtol=1e-3, atol=1e-4)
        assert not torch.allclose(score(exported), fresh, atol=1e-2)
    if kind in LIBRARY:
        library = LIBRARY[kind].from_pretrained(out)
        weights = dict(library.named_parameters())
        assert all(torch.equal(weights[name], each) for name, each in model.named_parameters())


def test_a_policy_that_no_library_has_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(ROOT / "recipes/manipulation.yaml", "params.yaml")
    policy = Path("artifacts/policies/all-1")
    policy.mkdir(parents=True)
    (policy / "state.json").write_text("{}")
    with pytest.raises(ParameterError, match="kind action_chunks cannot be exported"):
        export_policy(policy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_whole_policy_is_the_base_with_the_rounds_weights(tmp_path: Path):
    """As vLLM reads it; also of a base whose weights came in parts."""
    base, out = tmp_path / "base", tmp_path / "round-1"
    policy = tiny_policy()
    save_base(base, policy.model, policy.tokenizer)
    (base / "model-00001-of-00002.safetensors").write_bytes(b"a part")
    (base / "model.safetensors.index.json").write_text("{}")
    optimizer = make_optimizer(
        policy.model, read_params(ROOT / "params.yaml").arms["sgpo"].training
    )
    for each in trainable(policy.model).values():
        each.data += 1
    save_trained(out, gather_trained(policy.model, optimizer), PolicyState(name="round-1", arm="a"))
    with whole_policy(out, base) as whole:
        names = {each.name for each in whole.iterdir()}
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
        assert not {each for each in names if "-of-" in each or "index" in each}
        assert [each for each in names if each.endswith("safetensors")] == ["model.safetensors"]
        with safe_open(whole / "model.safetensors", "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, each in trainable(policy.model).items():
            assert torch.equal(found[name], each), name
        folder = whole
    assert not folder.exists()
    with whole_policy(base, base) as whole:
        assert whole == base
