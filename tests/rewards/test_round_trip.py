"""The judge of round trips: what its model maps back to the source, alone and in company."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sacrebleu import sentence_chrf
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertModel,
    M2M100ForConditionalGeneration,
    MarianMTModel,
    NllbTokenizer,
)

from grpo.errors import ParameterError
from grpo.modalities.seq2seq.bases import warm_up
from grpo.modalities.shared.tokenizers import make_byte_tokenizer, make_marked_tokenizer
from grpo.modalities.shared.warmup import WarmupSettings
from grpo.rewards.base import Task
from grpo.runtime.language_tokens import find_language_token
from grpo.sampling.judging import JointJudge
from grpo.wiring.rewards import build_reward
from tests.rewards.test_reward_model import params_of

ENGLISH = {"yksi": "one", "kaksi": "two", "kolme": "three", "kaksi yksi": "two one"}
TASKS = [
    Task(family="fi", prompt=f">>fi<< {each}", answer="", entry={}) for each in ENGLISH.values()
]
PAIRS = [
    (("fin_Latn", "me"), ("eng_Latn", "us")),
    (("spa_Latn", "me"), ("eng_Latn", "to me")),
    (("fin_Latn", "me"), ("spa_Latn", "nos")),
    (("spa_Latn", "me"), ("fin_Latn", "mua")),
]
WIDTHS = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


def fresh(model_class: Any, tokenizer: Any, start: int) -> Any:
    torch.manual_seed(0)
    config = model_class.config_class(
        **WIDTHS,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=start,
    )
    return model_class(config).eval()


@pytest.fixture(
    scope="module",
    params=[M2M100ForConditionalGeneration, pytest.param(MarianMTModel, marks=pytest.mark.long)],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of a model that translates ENGLISH back, and nothing else."""
    folder = tmp_path_factory.mktemp("trained")
    tokenizer = make_byte_tokenizer()
    model = fresh(request.param, tokenizer, start=tokenizer.bos_token_id)
    settings = WarmupSettings(seed=0, updates=150, rows_per_update=4, learning_rate=0.01)
    for _ in warm_up(model, tokenizer, [*ENGLISH.items()], settings):
        pass
    save(folder, model, tokenizer)
    return folder


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def judge_of(parent: Path, folder: Path) -> JointJudge:
    content = params_of(folder, judge="round_trip")
    first = content.reward.judges[0].model_copy(update={"score_range": None})
    reward = content.reward.model_copy(update={"judges": [first]})
    (judge,) = build_reward(content.model_copy(update={"reward": reward}), parent).judges.values()
    assert isinstance(judge, JointJudge)
    return judge


def test_what_is_mapped_back_to_its_source_earns_1_and_other_contents_earn_less(
    trained: Path, tmp_path: Path
):
    judge = judge_of(trained, tmp_path)
    for text, source in ENGLISH.items():
        judged = judge.judge([text] * len(TASKS), TASKS)
        for task, (shown, outcome) in zip(TASKS, judged, strict=True):
            assert shown == source
            expected = sentence_chrf(source, [task.source], word_order=2).score / 100
            assert outcome.score == pytest.approx(expected)
            assert (outcome.score > 0.999) == (task.source == source)


def test_scores_depend_neither_on_the_other_rollouts_nor_on_the_reference(
    trained: Path, tmp_path: Path
):
    """Repeated and unknown texts, of several lengths and with other limits, in one batch."""
    judge = judge_of(trained, tmp_path)
    texts = [*ENGLISH, "yksi", "", "x y z", "kolme" * 5, "kaksi yksi kolme"]
    tasks = [TASKS[row % len(TASKS)] for row in range(len(texts))]
    together = [*judge.judge(texts, tasks)]
    alone = [each for text, task in zip(texts, tasks) for each in judge.judge([text], [task])]
    referred = [replace(each, answer="yksi") for each in tasks]
    assert together == alone == [*judge.judge(texts, referred)]
    assert [outcome.status for _, outcome in together] == ["scored"] * len(texts)


def test_nothing_but_spaces_earns_nothing(trained: Path, tmp_path: Path):
    """The model may map it to anything."""
    judged = judge_of(trained, tmp_path).judge(["", " \n"], TASKS[:2])
    assert [(shown, outcome.score) for shown, outcome in judged] == [("", 0.0)] * 2


def test_a_back_translation_that_does_not_end_is_cut_off_at_twice_its_source(tmp_path: Path):
    """A bias makes every token an a; of the source, the tokenizer's mark of the start counts."""
    tokenizer = make_byte_tokenizer()
    model = fresh(MarianMTModel, tokenizer, start=tokenizer.bos_token_id)
    model.final_logits_bias[0, tokenizer.convert_tokens_to_ids("a")] = 1e4
    save(tmp_path, model, tokenizer)
    judged = judge_of(tmp_path, tmp_path).judge([*ENGLISH], TASKS)
    for task, (shown, _) in zip(TASKS, judged, strict=True):
        assert shown == "a" * 2 * (1 + len(task.source))


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of a model of three languages in the format of NLLB, trained on PAIRS."""
    folder = tmp_path_factory.mktemp("multilingual")
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = NllbTokenizer(
        vocab={each: row for row, each in enumerate(pieces)},
        merges=[],
        extra_special_tokens=["eng_Latn", "fin_Latn", "spa_Latn"],
    )

    def tokens(language: str, text: str) -> torch.Tensor:
        tokenizer.src_lang = language
        return torch.tensor(tokenizer(text)["input_ids"])

    model = fresh(M2M100ForConditionalGeneration, tokenizer, start=tokenizer.eos_token_id)
    asked = pad_sequence([tokens(*source) for source, _ in PAIRS], True, tokenizer.pad_token_id)
    wanted = pad_sequence([tokens(*target) for _, target in PAIRS], True, -100)
    attended = (asked != tokenizer.pad_token_id).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        model(input_ids=asked, attention_mask=attended, labels=wanted).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokenizer.src_lang = "eng_Latn"
    save(folder, model, tokenizer)
    return folder


def test_the_language_of_the_source_is_forced_and_that_of_the_answer_is_the_tag(
    multilingual: Path, tmp_path: Path
):
    tasks = [
        Task(family=tag, prompt=f">>{tag}<< {source}", answer="", entry={})
        for tag, source in [("fin_Latn", "us"), ("spa_Latn", "to me"), ("fin_Latn", "to me")]
    ]
    judged = [*judge_of(multilingual, tmp_path).judge(["me"] * 3, tasks)]
    assert [shown for shown, _ in judged] == ["us", "to me", "us"]
    assert [outcome.score > 0.999 for _, outcome in judged] == [True, True, False]


@pytest.mark.parametrize("prompt", ["one", ">>fi<< one"])
def test_a_tag_that_the_model_does_not_know_is_refused_in_one_line(
    multilingual: Path, prompt: str, tmp_path: Path
):
    ((_, outcome),) = judge_of(multilingual, tmp_path).judge(
        ["yksi"], [Task(family="", prompt=prompt, answer="", entry={})]
    )
    assert outcome.status == "failed"
    assert "round_trip needs prompts that begin with a token of a language" in outcome.detail


def test_languages_are_found_in_the_spellings_of_m2m100_and_nllb():
    """A piece of a word is no language."""
    tokenizer = make_marked_tokenizer(["fi"], ["__fi__", "fin_Latn"])
    for language in ("fi", "fin_Latn", "__fi__"):
        token = find_language_token(tokenizer, language)
        assert tokenizer.convert_ids_to_tokens(token) == {"fi": "__fi__"}.get(language, language)
    assert find_language_token(tokenizer, "es") is None


def test_a_missing_model_or_one_of_another_class_is_refused_in_one_line(tmp_path: Path):
    with pytest.raises(ParameterError, match=r"judges\[0\].model.path must be a directory"):
        judge_of(tmp_path, tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    save(tmp_path, BertModel(BertConfig(vocab_size=300, **sizes)), make_byte_tokenizer())
    with pytest.raises(ParameterError, match=r"judges\[0\].model .* cannot be loaded: ") as error:
        judge_of(tmp_path, tmp_path)
    assert "\n" not in str(error.value)
