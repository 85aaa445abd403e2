"""Judges of translations: what a right text earns and what the known tricks earn."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu import corpus_bleu, corpus_chrf, sentence_chrf

from grpo.errors import ParameterError
from grpo.rewards import find_judge
from grpo.rewards.base import AnswerJudge, JudgeInputs, Task
from grpo.sampling.scoring import score_corpora
from grpo.schema import Machine
from grpo.tasks.base import TaskInputs
from grpo.tasks.translation import Corpus, Kind, TranslationTask

MACHINE = Machine(device="cpu", dtype="float32", threads=1, compile=False)
INPUTS = JudgeInputs(where="reward.judges[0]", model=None, data=Path(), machine=MACHINE)
NAMES = ("exact", "copying", "length", "format", "chrf", "language", "embeddings")
LANGUAGES = ("es", "fi", "hu", "ja", "ka", "ru", "tr")


def judge(name: str) -> AnswerJudge:
    loaded: Any = find_judge(name).load(INPUTS)
    return loaded


def tasks(kind: Kind, *, count: int = 140) -> list[Task]:
    task = TranslationTask(
        kind="translation",
        train_prompts=count,
        eval_prompts=1,
        kinds={kind: 1.0},
        below=1000,
        languages={each: Corpus(pairs=1.0, noise=0.0) for each in LANGUAGES},
    )
    train: pd.DataFrame = task.make_prompts(
        TaskInputs(seed=0, data=Path(), warmup=None, takes_messages=False)
    ).train
    return [
        Task(family=row.family, prompt=row.prompt, answer=row.answer, entry=json.loads(row.entry))
        for row in train.itertuples()
    ]


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("name", ["exact", "format", "chrf"])
def test_a_reference_earns_everything(name: str, kind: Kind):
    score = judge(name)
    assert [score(task.answer, task) for task in tasks(kind)] == pytest.approx([1.0] * 140)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)  # the first answer loads a model
@given(answer=st.text(max_size=30))
def test_whatever_is_written_earns_a_number_of_the_range(name: str, answer: str):
    task = Task(family="fi", prompt=">>fi<< 3 days", answer="3 päivää", entry={"language": "fi"})
    low = -1.0 if name == "embeddings" else 0.0
    assert low <= judge(name)(answer, task) <= 1.0 + 1e-6


def test_chrf_is_that_of_sacrebleu_with_words():
    score = judge("chrf")
    units = tasks("units")
    for task, other in pairwise(units):
        expected = sentence_chrf(other.answer, [task.answer], word_order=2).score / 100
        assert score(other.answer, task) == pytest.approx(expected)


def test_corpora_of_families_are_scored_as_sacrebleu_does():
    """Every other text is that of another prompt; BLEU of Japanese is of characters."""
    asked = [each for each in tasks("dates") if each.family in ("es", "ja")]
    prompts = pd.DataFrame(
        {
            "prompt_id": [f"p{index}" for index in range(len(asked))],
            "family": [each.family for each in asked],
            "prompt": [each.prompt for each in asked],
            "answer": [each.answer for each in asked],
            "entry": "{}",
        }
    )
    texts = [asked[index - index % 2].answer for index in range(len(asked))]
    rollouts = prompts[["prompt_id"]].assign(text=[f"work#{each}\n" for each in texts])
    scorer = find_judge("chrf").score_corpus
    assert scorer is not None
    found = score_corpora(rollouts, prompts, [scorer], answer_pattern="(?s)^work#(.*)$")
    assert found.keys() == {"es", "ja"}
    for family, tokens in (("es", "13a"), ("ja", "char")):
        rows = [index for index, each in enumerate(asked) if each.family == family]
        own, references = [texts[row] for row in rows], [[asked[row].answer for row in rows]]
        assert found[family] == {
            "chrf": pytest.approx(corpus_chrf(own, references, word_order=2).score / 100),
            "bleu": pytest.approx(corpus_bleu(own, references, tokenize=tokens).score / 100),
        }
        assert 0.2 < found[family]["bleu"] < 1


def test_exact_ignores_the_form_of_characters_and_spaces_and_nothing_else():
    task = Task(family="fi", prompt=">>fi<< a cafe", answer="caf\u00e9 olé", entry={})
    score = judge("exact")
    assert score("cafe\u0301  olé ", task) == 1.0
    assert score("cafe olé", task) == score("Café olé", task) == score("", task) == 0.0


@pytest.mark.parametrize("kind", ["numbers", "dates", "units", "money"])
def test_copies_of_the_source_and_nothing_else_are_refused(kind: Kind):
    score = judge("copying")
    for task in tasks(kind):
        assert score(task.answer, task) == 1.0
        for copy in (task.source, task.source.upper(), f" {task.source}  "):
            assert score(copy, task) == 0.0
        assert not task.source.startswith(">>")


def test_a_shorter_or_longer_answer_than_the_source_earns_less():
    score = judge("length")
    for task in tasks("dates"):
        size = len(task.source)
        earned = [score("x" * count, task) for count in range(2 * size + 1)]
        assert earned == pytest.approx(
            [min(count, size) / max(count, size) for count in range(2 * size + 1)]
        )


@pytest.mark.parametrize("answer", ["", " ", "two\nlines", "a\tb", "bro\ufffdken", "\x00"])
def test_what_is_not_a_line_of_text_has_no_form(answer: str):
    assert judge("format")(answer, tasks("units")[0]) == 0.0


def test_dates_in_the_asked_language_earn_more_than_copies_and_other_languages():
    """Japanese dates are mostly digits; their median is compared, as the others'."""
    score, dates = judge("language"), tasks("dates")
    for language in LANGUAGES:
        asked = [each for each in dates if each.family == language]
        own = np.median([score(each.answer, each) for each in asked])
        copied = np.median([score(each.source, each) for each in asked])
        others = np.median(
            [score(each.answer, asked[0]) for each in dates if each.family != language]
        )
        assert own > 0.7
        assert max(copied, others) < 0.1


def test_the_language_of_a_whole_text_counts():
    """By default the library reads the first 80 characters only."""
    task = Task(family="fi", prompt=">>fi<< x", answer="", entry={"language": "fi"})
    finnish = "Tämä on melko pitkä suomenkielinen lause, jossa kerrotaan talvisesta säästä siellä. "
    english = "And this is a longer text in English, which says nothing about the weather. "
    assert judge("language")(finnish, task) > 0.9
    assert judge("language")(finnish + 5 * english, task) < 0.5


def test_the_tag_of_a_prompt_names_the_language_if_its_entry_does_not():
    score, finnish = judge("language"), "maanantai 16. syyskuuta 1996"
    for tag, entry in (("fi", {}), ("fin_Latn", {}), ("jpn_Jpan", {"language": "fi"})):
        task = Task(family="", prompt=f">>{tag}<< Monday", answer="", entry={**entry})
        assert score(finnish, task) > 0.9
    assert score(finnish, Task(family="", prompt=">>jpn_Jpan<< x", answer="", entry={})) < 0.1


def test_a_language_that_is_not_identified_is_refused_in_one_line():
    task = Task(family="", prompt=">>tlh<< one", answer="", entry={"language": "tlh"})
    with pytest.raises(
        ParameterError, match=r"the judge language needs an entry or a tag .* got 'tlh'"
    ):
        judge("language")("wa'", task)


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("dates", 0.95),
        *(pytest.param(kind, 0.9, marks=pytest.mark.long) for kind in ("units", "money")),
    ],
)
def test_a_translation_means_more_of_its_source_than_of_another(kind: Kind, least: float):
    """The share of answers whose cosine is above that of the answer to another prompt."""
    score, asked = judge("embeddings"), tasks(kind, count=70)
    wins = [
        score(task.answer, task) > score(other.answer, task)
        for task, other in zip(asked, asked[1:] + asked[:1])
        if task.family == other.family
    ]
    assert len(wins) == 70 - len(LANGUAGES)
    assert np.mean(wins) >= least
    assert score(asked[0].source, asked[0]) == pytest.approx(1.0, abs=1e-5)  # a copy
