"""Texts to be drawn: disjoint prompts, drawings that OCR reads, a judge that tells them apart."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.shared.drawings import Drawing, draw_texts
from grpo.params.parameters import read_params
from grpo.rewards.base import Task
from grpo.rewards.ocr import read_texts, score_text
from grpo.sampling.scoring import score_captions, score_rollouts
from grpo.tasks.glyphs import make_prompts
from grpo.wiring.rewards import build_reward
from grpo.wiring.tasks import build_prompts

ROOT = Path(__file__).parents[2]
PARAMS = read_params(ROOT / "recipes" / "glyphs.yaml")
FAMILIES = {"digits": ["23", "2345", "23"], "letters": ["ACE", "FHK"]}
STYLE = Drawing(16, 32, 11, 8)


def make(seed: int = 0, wrong: float = 0.0, **changes):
    settings = {
        "families": FAMILIES,
        "train_prompts": 8,
        "eval_prompts": 4,
        "warmup_prompts": {"digits": 200, "letters": 200},
    }
    return make_prompts(**{**settings, **changes}, wrong_fraction=wrong, seed=seed)


def test_prompts_of_train_eval_and_warmup_are_disjoint():
    tables = build_prompts(PARAMS, ROOT / "data")
    train, evaluation, warmup = (set(table["prompt"]) for table in tables)
    assert len(train) == len(tables.train) == 288
    assert len(evaluation) == len(tables.eval) == 150
    assert not train & evaluation
    assert not (train | evaluation) & (warmup | set(tables.warmup["solution"]))
    assert tables.train["family"].value_counts().eq(48).all()


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others():
    first, second, other = make(), make(), make(seed=1)
    assert first.train.equals(second.train)
    assert first.warmup.equals(second.warmup)
    assert not first.train.equals(other.train)


def test_drawings_are_wrong_as_often_as_asked():
    """400 captions at 0.3; a wrong drawing may show the right text by chance, so at most that."""
    warmup = make(wrong=0.3).warmup
    differing = (warmup["prompt"] != warmup["solution"]).mean()
    assert 0.1 < differing < 0.3 + 4 * (0.3 * 0.7 / 400) ** 0.5
    right = make().warmup
    assert right["prompt"].equals(right["solution"])


def test_a_family_with_too_few_texts_is_named():
    with pytest.raises(
        ParameterError, match=r"task.families.letters must have more texts .*, got 9"
    ):
        make(train_prompts=16)


def test_the_judge_reads_what_the_warmup_draws():
    """Clean drawings of the recipe's families: at least 97 of 100 are read to the letter."""
    texts = build_prompts(PARAMS, ROOT / "data").eval["prompt"].tolist()[::2]
    read = read_texts(draw_texts(texts, STYLE))
    assert np.mean([ours == wanted for ours, wanted in zip(read, texts)]) >= 0.97


def test_color_and_the_company_of_other_images_change_nothing():
    texts = ["234", "ACE"]
    gray = draw_texts(texts, STYLE)
    colored = np.repeat(gray, 3, axis=1)
    assert read_texts(gray) == read_texts(colored) == texts
    assert read_texts(gray[:1]) + read_texts(gray[1:]) == texts


def test_noise_is_not_read_as_the_text():
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, size=(8, 1, 16, 32), dtype=np.uint8)
    assert not set(read_texts(noise)) & {"234", "ACE"}
    assert read_texts(noise[:0]) == []


@pytest.mark.parametrize(
    ("answer", "score"),
    [("ACE", 1.0), ("AC", 2 / 3), ("ACEE", 2 / 3), ("AXE", 2 / 3), ("", 0.0), ("XXXXXXX", 0.0)],
)
def test_the_score_is_one_minus_the_edit_distance_per_character(answer: str, score: float):
    task = Task(family="letters", prompt="ace", answer="ace", entry={})
    assert score_text(answer, task) == pytest.approx(score)


@pytest.mark.parametrize("maximize", ["outcome", "score"])
def test_an_image_is_judged_by_what_is_read_off_it(maximize: str):
    reward = PARAMS.reward.model_copy(update={"maximize": maximize})
    rule = build_reward(PARAMS.model_copy(update={"reward": reward}), ROOT / "data")
    media = draw_texts(["234", "235", ""], STYLE)
    rollouts = pd.DataFrame(
        {
            "rollout_id": ["a", "b", "c"],
            "prompt_id": "p",
            "text": "",
            "is_finished": True,
            "steps": 1,
        }
    )
    prompts = pd.DataFrame(
        {"prompt_id": ["p"], "family": "digits", "prompt": "234", "answer": "234", "entry": "{}"}
    )
    judged = score_rollouts(rollouts, prompts, rule, media=media)
    assert judged["outcome"].tolist() == [1, 0, 0]
    assert judged["status"].tolist() == ["scored"] * 3
    expected = [1, 0, 0] if maximize == "outcome" else [1, 2 / 3, 0]
    assert judged["reward"].tolist() == pytest.approx(expected)
    with pytest.raises(ArtifactError, match="must have an image per rollout, has 2 for 3"):
        score_rollouts(rollouts, prompts, rule, media=media[:2])


def test_what_is_drawn_on_the_way_scores_as_a_rollout_does():
    """Captions stand for their prompts; two prompts of one text are one."""
    rule = build_reward(PARAMS, ROOT / "data")
    prompts = pd.DataFrame(
        {
            "prompt_id": ["p", "q", "r"],
            "family": "digits",
            "prompt": ["234", "55", "234"],
            "answer": ["234", "55", "234"],
            "entry": "{}",
        }
    )
    media = draw_texts(["234", "235", "55"], STYLE)
    scores = score_captions(["234", "234", "55"], media, tasks=prompts, rule=rule)
    assert scores == pytest.approx([1, 2 / 3, 1])
