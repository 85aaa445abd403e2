"""An encoder-decoder policy samples from the density it scores with, for several classes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.seq2seq.bases import require_sampling, warm_up
from grpo.modalities.seq2seq.modality import BeamSearch, Seq2Seq, Seq2SeqDraws, Seq2SeqPolicyParams
from grpo.modalities.seq2seq.policy import Seq2SeqPolicy
from grpo.modalities.shared.flops import missing_flop_formulas
from grpo.modalities.shared.packed import select_packed
from grpo.modalities.shared.recomputation import recompute_blocks
from grpo.modalities.shared.text_modality import Decoding
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.shared.warmup import WarmupSettings
from grpo.params.parameters import read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from tests.modalities.tiny import seeded

ROOT = Path(__file__).parents[2]

MODALITY = Seq2Seq()
PROMPTS = ["one", "a longer source", "and two"]
SIZES = [3, 2, 4]
QUICK, OTHERS = ["m2m100", "t5"], ["marian", "bart"]  # the others are in long runs
KINDS = [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
WIDTHS = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}


def model_of(kind: str) -> PreTrainedModel:
    """Returns a tiny model with sharp random weights."""
    tokenizer = make_byte_tokenizer()
    marks = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.bos_token_id,
    }
    torch.manual_seed(0)
    made: PreTrainedModel
    if kind == "t5":
        made = T5ForConditionalGeneration(
            T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **marks)
        )
    else:
        classes: dict[str, tuple[Any, Any]] = {
            "m2m100": (M2M100ForConditionalGeneration, M2M100Config),
            "marian": (MarianMTModel, MarianConfig),
            "bart": (BartForConditionalGeneration, BartConfig),
        }
        make, config = classes[kind]
        made = make(config(init_std=0.3, **WIDTHS, **marks))
    return made.eval()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def count_flops() -> FlopCounterMode:
    """Returns torch's counter with the formulas that it lacks."""
    added = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]}
    return FlopCounterMode(display=False, custom_mapping={**missing_flop_formulas(), **added})


def policy_of(kind: str, *, temperature: float = 1.0, max_steps: int = 6) -> Seq2SeqPolicy:
    return Seq2SeqPolicy(
        model_of(kind),
        make_byte_tokenizer(),
        decoding=Decoding(temperature=temperature, max_steps=max_steps),
        forces_tag=False,
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
    policy = policy_of(kind)
    trajectory, logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    model: Any = policy.model
    for row, group in enumerate(trajectory.group.tolist()):
        source = trajectory.prompt[group][trajectory.prompt_mask[group]][None]
        labels = trajectory.tokens[row][trajectory.mask[row]][None]
        start = torch.full((1, 1), policy.tokenizer.bos_token_id)
        read = torch.cat([start, labels[:, :-1]], dim=1)
        with torch.no_grad():
            loss = model(input_ids=source, decoder_input_ids=read, labels=labels).loss
        expected = -loss.item() * labels.shape[1]
        assert float(logp[row].sum()) == pytest.approx(expected, abs=1e-4)


def test_the_encoders_gradient_is_that_of_the_whole_group(kind: str):
    """One pass over a prompt for its group, against one pass per rollout."""
    policy = policy_of(kind)
    trajectory, _ = policy.sample(PROMPTS[:1], group_sizes=[4], generator=seeded())
    weights = [each for each in policy.model.parameters() if each.requires_grad]
    shared = torch.autograd.grad(policy.log_prob(trajectory).sum(), weights, allow_unused=True)
    apart = [torch.zeros_like(each) for each in weights]
    for row in range(4):
        logp = policy.log_prob(trajectory.select(torch.tensor([row]), 6))
        found = torch.autograd.grad(logp.sum(), weights, allow_unused=True)
        apart = [total + (0 if each is None else each) for total, each in zip(apart, found)]
    for one, other in zip(shared, apart):
        if one is not None:
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_recomputation_leaves_log_probs_and_gradients_as_they_are(kind: str):
    plain, again = policy_of(kind), policy_of(kind)
    recompute_blocks(again.model)
    trajectory, _ = plain.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    found = []
    for policy in (plain, again):
        logp = policy.log_prob(trajectory)
        weights = [each for each in policy.model.parameters() if each.requires_grad]
        found.append([logp, *torch.autograd.grad(logp.sum(), weights, allow_unused=True)])
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
    policy = policy_of("m2m100", temperature=0.8, max_steps=1)
    trajectory, _ = policy.sample(["one"], group_sizes=[8000], generator=seeded())
    model: Any = policy.model
    source, _, _ = policy.encode(["one"])
    start = torch.full((1, 1), policy.tokenizer.bos_token_id)
    with torch.no_grad():
        logits = model(input_ids=source, decoder_input_ids=start).logits[0, -1] / 0.8
    chance = logits.softmax(0)
    counts = torch.bincount(trajectory.tokens[:, 0], minlength=len(chance)) / 8000
    error = (chance * (1 - chance) / 8000).sqrt()
    assert ((counts - chance).abs() <= 4.5 * error + 1e-4).all()


def test_greedy_takes_the_most_likely_token_and_has_no_density(kind: str):
    policy = policy_of(kind, temperature=0.0)
    trajectory, _ = policy.sample(PROMPTS, group_sizes=[1, 1, 1], generator=seeded())
    with pytest.raises(ValueError, match="temperature > 0"):
        policy.log_prob(trajectory)
    policy.decoding = replace(policy.decoding, temperature=1.0)
    model: Any = policy.model
    for row in range(len(PROMPTS)):
        source = trajectory.prompt[row][trajectory.prompt_mask[row]][None]
        tokens = trajectory.tokens[row][trajectory.mask[row]]
        start = torch.tensor([policy.tokenizer.bos_token_id])
        read = torch.cat([start, tokens[:-1]])[None]
        with torch.no_grad():
            logits = model(input_ids=source, decoder_input_ids=read).logits[0]
        assert torch.equal(logits.argmax(1), tokens)


def test_a_rollout_ends_at_an_end_token_or_the_limit():
    policy = policy_of("m2m100", max_steps=40)
    trajectory, _ = policy.sample(["one"], group_sizes=[64], generator=seeded())
    ended = policy.is_finished(trajectory)
    assert ended.any()
    lengths = trajectory.mask.sum(dim=1)
    last = trajectory.tokens.gather(1, lengths[:, None] - 1)[:, 0]
    assert torch.equal(torch.isin(last, policy.end_tokens), ended)
    assert (lengths[~ended] == 40).all()
    before = trajectory.mask.clone()
    before[torch.arange(64), lengths - 1] = False
    assert not torch.isin(trajectory.tokens[before], policy.end_tokens).any()


def test_packed_rollouts_come_back_and_score_the_same(kind: str):
    policy = policy_of(kind)
    trajectory, logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    tensors = trajectory.pack(logp)
    restored, behavior = policy.unpack(tensors, trajectory.group)
    torch.testing.assert_close(behavior, logp)
    kept = torch.tensor([False, True] * 4 + [True])
    few, few_logp = policy.unpack(
        select_packed(policy.layout, tensors, trajectory.group, kept), trajectory.group[kept]
    )
    with torch.no_grad():
        torch.testing.assert_close(policy.log_prob(restored), logp, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(policy.log_prob(few), few_logp, atol=2e-5, rtol=1e-5)
    broken = {**tensors, "tokens": tensors["tokens"].clone()}
    broken["tokens"][0] = 10_000
    with pytest.raises(ArtifactError, match="tokens of row 0, entry 0"):
        policy.unpack(broken, trajectory.group)


@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_torch_counts(kind: str, backward: bool):
    policy = policy_of(kind)
    trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    _ = policy.passes.forward_counts, policy.passes.training_counts  # counted before
    whole = trajectory.mask.clone()
    whole[:] = True
    trajectory = replace(trajectory, mask=whole)
    before = policy.cost
    counter = count_flops()
    with counter, torch.set_grad_enabled(backward):
        logp = policy.log_prob(trajectory)
        if backward:
            weights = [each for each in policy.model.parameters() if each.requires_grad]
            torch.autograd.grad(logp.sum(), weights, allow_unused=True)
    assert policy.cost.flops - before.flops == counter.get_total_flops()


def test_sampling_costs_what_torch_counts(kind: str):
    policy = policy_of(kind)
    _ = policy.passes.forward_counts
    counter = count_flops()
    with counter:
        trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    assert policy.cost.flops == counter.get_total_flops()
    assert policy.cost.sampled_steps == int(trajectory.mask.sum())


def test_a_tag_becomes_the_token_that_the_decoder_begins_with():
    policy = policy_of("m2m100")
    policy.forces_tag = True
    trajectory, sampled = policy.sample(
        [">>d<< one", ">>e<<one"], group_sizes=[2, 1], generator=seeded()
    )
    known = policy.tokenizer.convert_tokens_to_ids(["d", "e"])
    assert trajectory.forced.tolist() == known
    plain, _, _ = policy_of("m2m100").encode(["one"])
    assert trajectory.prompt[0][trajectory.prompt_mask[0]].tolist() == plain[0].tolist()
    with torch.no_grad():
        torch.testing.assert_close(policy.log_prob(trajectory), sampled, atol=2e-5, rtol=1e-5)
    model: Any = policy.model
    read = torch.tensor([[policy.tokenizer.bos_token_id, known[0]]])
    with torch.no_grad():
        logits = model(input_ids=plain, decoder_input_ids=read).logits[0, -1]
    first = logits.log_softmax(0)[trajectory.tokens[0, 0]]
    assert float(sampled[0, 0]) == pytest.approx(float(first), abs=1e-5)
    with pytest.raises(ParameterError, match=r"policy\.forces_tag needs prompts"):
        policy.encode(["no tag"])


@pytest.mark.parametrize(("prompt", "max_steps"), [("a" * 80, 4), ("a", 80)])
def test_more_positions_than_the_model_has_are_refused(prompt: str, max_steps: int):
    policy = policy_of("marian", max_steps=max_steps)
    with pytest.raises(ParameterError, match=r"must need at most 64 positions.*got 8\d"):
        policy.sample([prompt], group_sizes=[1], generator=seeded())


def test_models_that_decode_are_accepted(kind: str):
    require_sampling(model_of(kind), make_byte_tokenizer())


def test_a_warm_up_learns_to_copy():
    """The loss of a model that knows nothing is ln 256 = 5.5 nats."""
    torch.manual_seed(0)
    model = model_of("m2m100")
    words = ["ab", "ba", "aab", "bba"]
    settings = WarmupSettings(updates=120, rows_per_update=4, learning_rate=1e-2, seed=0)
    pairs = [(word, word) for word in words]
    updates = list(warm_up(model, make_byte_tokenizer(), pairs, settings))
    assert updates[0].loss > 3.0
    assert updates[-1].loss < 0.1
    policy = Seq2SeqPolicy(
        model,
        make_byte_tokenizer(),
        decoding=Decoding(temperature=0.0, max_steps=8),
        forces_tag=False,
    )
    trajectory, _ = policy.sample(words, group_sizes=[1] * 4, generator=seeded())
    assert policy.decode(trajectory) == words


def test_a_beam_search_as_wide_as_the_vocabulary_finds_the_best_rollout(kind: str):
    """Of all rollouts of one or two tokens, by the mean log-prob of a token."""
    policy = policy_of(kind, max_steps=2)
    policy.model.generation_config.forced_eos_token_id = None  # BART's own: the end at the limit
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    trajectory, _ = policy.sample(PROMPTS, group_sizes=[1] * 3, generator=seeded())
    pairs = torch.cartesian_prod(torch.arange(vocabulary), torch.arange(vocabulary))
    policy.decoding = BeamSearch(temperature=0.0, max_steps=2, beams=vocabulary)
    found, logp = policy.sample(PROMPTS, group_sizes=[1] * 3, generator=seeded())
    assert float(logp.abs().max()) == 0
    policy.decoding = Decoding(temperature=1.0, max_steps=2)
    mask = torch.ones_like(pairs, dtype=torch.bool)
    mask[:, 1] = ~torch.isin(pairs[:, 0], policy.end_tokens)
    prompt = torch.full((len(pairs),), 1)
    every = replace(trajectory, group=prompt, tokens=pairs, mask=mask)
    with torch.no_grad():
        mean = policy.log_prob(every).sum(dim=1) / mask.sum(dim=1)
        chosen = policy.log_prob(found)[1].sum() / found.mask[1].sum()
    assert float(chosen) == pytest.approx(float(mean.max()), abs=1e-5)


def test_an_evaluation_has_a_beam_search_if_there_are_beams():
    params: dict[str, Any] = parse_yaml((ROOT / "recipes" / "translation.yaml").read_text())
    policy = Seq2SeqPolicyParams(**params["policy"])
    for beams, kinds in ((1, ["greedy", "sampled"]), (5, ["greedy", "sampled", "beam"])):
        draws = MODALITY.evaluation_draws(policy, Seq2SeqDraws(temperature=1.0, beams=beams))
        assert [*draws] == kinds
    assert draws["beam"] == BeamSearch(temperature=0.0, max_steps=policy.max_steps, beams=5)
    profiled = MODALITY.profile_draws(policy, Seq2SeqDraws(temperature=0.5, beams=5))
    assert profiled == Decoding(temperature=0.5, max_steps=policy.max_steps)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"updates": None}, "policy.base.warmup.updates must be an integer, got null"),
        ({"answer_mark": "#"}, "policy.base.warmup.worked_fraction is missing"),
    ],
)
def test_a_wrong_warmup_is_named_by_its_parameter(
    changes: dict[str, Any], said: str, tmp_path: Path
):
    recipe: dict[str, Any] = parse_yaml((ROOT / "recipes" / "smoke.yaml").read_text())
    base = recipe["policy"]["base"]
    base["warmup"] = {"prompts": 9, "updates": 9, "rows_per_update": 9, "learning_rate": 0.1}
    base["warmup"] |= changes
    recipe["policy"] = {
        "kind": "seq2seq",
        "base": {**base, "architecture": "MarianMTModel", "config": {}},
        "lora": None,
        "recompute": False,
        "source_language": None,
        "forces_tag": False,
        "max_steps": 4,
    }
    path = tmp_path / "params.yaml"
    path.write_text(dump_yaml(recipe))
    with pytest.raises(ParameterError) as error:
        read_params(path)
    assert str(error.value).removeprefix(f"{path}: ") == said
