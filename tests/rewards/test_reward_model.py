"""Judges by models of texts: what the model itself says, alone, in company and from a file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from grpo.errors import ParameterError
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.params.parameters import Parameters, read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.rewards.base import Task
from grpo.sampling.judging import JointJudge
from grpo.wiring.rewards import build_reward, check_gold_answers

ROOT = Path(__file__).parents[2]
TEXTS = ["7", "a longer answer", "", "so 12"]
TASKS = [
    Task(family="f", prompt=each, answer="", entry={}) for each in ("1+6=", "why?", "x", "5+7=")
]
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def save_model(directory: Path, *, chat: bool, labels: int = 1) -> tuple[Any, Any]:
    """Writes a fresh model with a tokenizer of bytes, and returns them."""
    tokenizer = make_byte_tokenizer()
    size = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": tokenizer.pad_token_id,
        "num_labels": labels,
    }
    torch.manual_seed(0)
    if chat:
        tokenizer.chat_template = CHAT
        model: Any = LlamaForSequenceClassification(LlamaConfig(**size))
    else:
        model = BertForSequenceClassification(BertConfig(**size))
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer


def params_of(folder: Path, *, judge: str = "reward_model") -> Parameters:
    content = parse_yaml((ROOT / "recipes" / "smoke.yaml").read_text())
    first = {
        "judge": judge,
        "model": {"source": "directory", "path": "model"},
        "score_range": [-5.0, 5.0],
    }
    content["reward"]["judges"][0] |= first
    content["reward"] |= {"answer_pattern": None, "timeout_seconds": None, "maximize": "score"}
    file = folder / "params.yaml"
    file.write_text(dump_yaml(content))
    return read_params(file)


def judge_of(folder: Path, name: str = "reward_model") -> JointJudge:
    (judge,) = build_reward(params_of(folder, judge=name), folder).judges.values()
    assert isinstance(judge, JointJudge)
    return judge


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("chat", [False, True], ids=["pairs", "chats"])
def test_a_score_is_the_models_output_mapped_by_the_range(tmp_path: Path, chat: bool, pads: bool):
    """Also of texts of several lengths in one batch, and where the tokenizer cannot pad."""
    model, tokenizer = save_model(tmp_path / "model", chat=chat)
    if not pads:
        tokenizer.pad_token = None
        tokenizer.save_pretrained(tmp_path / "model")
    judged = [*judge_of(tmp_path).judge(TEXTS, TASKS)]
    for text, task, (shown, outcome) in zip(TEXTS, TASKS, judged, strict=True):
        if chat:
            chat_text = f"<user>{task.prompt}<assistant>{text}"
            asked = tokenizer(chat_text, add_special_tokens=False, return_tensors="pt")
        else:
            asked = tokenizer([task.prompt], [text], return_tensors="pt")
        with torch.no_grad():
            raw = float(model(**asked).logits[0, 0])
        assert outcome.score == pytest.approx((raw + 5) / 10, abs=1e-5)
        assert float(shown) == pytest.approx(raw, abs=1e-3)


def test_a_model_of_several_outputs_or_of_another_class_is_refused(tmp_path: Path):
    save_model(tmp_path / "model", chat=False, labels=2)
    with pytest.raises(ParameterError, match=r"judges\[0\].model .* it has 2 outputs; a reward"):
        judge_of(tmp_path)
    model, _ = save_model(tmp_path / "model", chat=True)
    model.model.save_pretrained(tmp_path / "model")  # without its head
    with pytest.raises(ParameterError, match=r"no score.weight, which a SequenceClassification"):
        judge_of(tmp_path)


def test_a_reward_model_does_not_read_the_tag_of_a_language(tmp_path: Path):
    save_model(tmp_path / "model", chat=False)
    tagged = [replace(each, prompt=f">>fin_Latn<< {each.prompt}") for each in TASKS]
    judge = judge_of(tmp_path)
    assert [*judge.judge(TEXTS, tagged)] == [*judge.judge(TEXTS, TASKS)]


def test_labse_is_the_cosine_of_the_poolers_outputs(tmp_path: Path):
    classifier, tokenizer = save_model(tmp_path / "model", chat=False)
    model = classifier.bert
    model.save_pretrained(tmp_path / "model")

    def embed(text: str) -> torch.Tensor:
        with torch.no_grad():
            return model(**tokenizer(text, return_tensors="pt")).pooler_output[0]

    judge, asked = judge_of(tmp_path, "labse"), [*TASKS, TASKS[1]]
    judged = [*judge.judge([*TEXTS, "why?"], asked)]
    for text, task, (shown, outcome) in zip([*TEXTS, "why?"], asked, judged, strict=True):
        cosine = float(torch.cosine_similarity(embed(task.prompt), embed(text), dim=0))
        assert outcome.score == pytest.approx((cosine + 5) / 10, abs=1e-5)
        assert float(shown) == pytest.approx(cosine, abs=1e-3)
    assert judged[-1][0] == "1.000"  # a copy of its source


def test_labse_without_its_pooler_is_refused(tmp_path: Path):
    model, _ = save_model(tmp_path / "model", chat=False)
    BertModel(model.config, add_pooling_layer=False).save_pretrained(tmp_path / "model")
    with pytest.raises(ParameterError, match=r"no pooler.dense.bias, which a BertModel has"):
        judge_of(tmp_path, "labse")


def test_a_judge_of_whole_texts_needs_no_pattern_and_judges_no_reference(tmp_path: Path):
    save_model(tmp_path / "model", chat=False)
    params = params_of(tmp_path)
    assert check_gold_answers(params) is None
    content = parse_yaml((tmp_path / "params.yaml").read_text())
    content["evaluation"]["judges"] = [{"judge": "exact", "model": None, "score_range": None}]
    (tmp_path / "params.yaml").write_text(dump_yaml(content))
    with pytest.raises(ParameterError, match=r"reward.answer_pattern must be stated with judge"):
        read_params(tmp_path / "params.yaml")
