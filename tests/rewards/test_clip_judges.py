"""CLIP score and PickScore on a tiny model of the real class: numbers, and what is refused."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM

from grpo.errors import ParameterError
from grpo.params.parameters import Parameters, read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.rewards.base import Task, Viewer, take_frames
from grpo.sampling.judging import JointJudge
from grpo.wiring.rewards import build_reward
from tests.rewards.tiny_clip import save_clip

ROOT = Path(__file__).parents[2]
PROMPTS = ["a cat", "two dogs", "", "a prompt of more bytes than the model takes"]
TASKS = [Task(family="f", prompt=each, answer="", entry={}) for each in PROMPTS]
LOW, HIGH = -20.0, 20.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    save_clip(directory / "clip")
    return directory


def content_of(judge: str = "clip", *, path: str = "clip", ends: Any = (LOW, HIGH)) -> Any:
    """Returns the image recipe with a judge by a model."""
    content = parse_yaml((ROOT / "recipes" / "glyphs.yaml").read_text())
    model = {"source": "directory", "path": path}
    asked = {"judge": judge, "model": model, "score_range": list(ends)}
    content["reward"]["judges"][0] |= asked
    return content


def params_of(tmp_path: Path, *args: Any, **settings: Any) -> Parameters:
    file = tmp_path / "params.yaml"
    file.write_text(dump_yaml(content_of(*args, **settings)))
    return read_params(file)


def viewer(tmp_path: Path, data: Path, *args: Any, **settings: Any) -> Viewer:
    (judge,) = build_reward(params_of(tmp_path, *args, **settings), data).judges.values()
    assert isinstance(judge, JointJudge)
    assert judge.reads_media
    return judge.view  # type: ignore[return-value]


def pictures(*shape: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, size=(len(TASKS), *shape), dtype=np.uint8)


def raw(views: list) -> list[float]:
    """Returns the raw scores that people are shown, of three decimals."""
    return [float(each.text) for each in views]


@pytest.mark.parametrize("judge", ["clip", "pickscore"])
def test_the_raw_score_is_the_models_own_logit(tmp_path: Path, data: Path, judge: str):
    """PIL images and unpadded prompts, as a model card writes it, one pair at a time."""
    model, processor = save_clip(tmp_path / "same")
    images = pictures(3, 24, 32)
    wanted = []
    for image, prompt in zip(images, PROMPTS):
        inputs = processor(
            text=[prompt],
            images=[Image.fromarray(image.transpose(1, 2, 0))],
            padding=True,
            truncation=True,
            max_length=model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        )
        with torch.no_grad():
            wanted.append(float(model(**inputs).logits_per_image[0, 0]))
    views = viewer(tmp_path, data, judge)(images, TASKS)
    assert raw(views) == pytest.approx(wanted, abs=6e-4)  # of three decimals
    assert [each.score for each in views] == pytest.approx(wanted, rel=1e-5)
    assert len({each.text for each in views}) == len(TASKS)


def test_a_directory_needs_no_network(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    viewer(tmp_path, data, "pickscore")(pictures(3, 16, 16), TASKS)


def test_scores_leave_the_range_at_its_ends(tmp_path: Path, data: Path):
    """A range within the raw scores: what is below counts as 0, what is above as 1."""
    images = pictures(3, 16, 16)
    ordered = sorted(raw(viewer(tmp_path, data)(images, TASKS)))
    (judge,) = build_reward(params_of(tmp_path, ends=ordered[1:3]), data).judges.values()
    assert isinstance(judge, JointJudge)
    inner = judge.judge(images, TASKS)
    scores = [outcome.score for _, outcome in sorted(inner, key=lambda each: float(each[0]))]
    assert scores == pytest.approx([0, 0, 1, 1], abs=1e-2)


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 16, 16), (3, 9, 16, 16)])
def test_order_and_company_change_nothing(tmp_path: Path, data: Path, shape: tuple[int, ...]):
    view = viewer(tmp_path, data)
    images = pictures(*shape)
    together = view(images, TASKS)
    backwards = view(images[::-1], TASKS[::-1])[::-1]
    alone = [view(images[row : row + 1], [task])[0] for row, task in enumerate(TASKS)]
    for other in (backwards, alone):
        scores = [each.score for each in together]
        assert scores == pytest.approx([each.score for each in other], abs=1e-5)


def test_a_clip_scores_the_mean_of_its_frames_and_gray_is_color(tmp_path: Path, data: Path):
    view = viewer(tmp_path, data)
    clips = pictures(3, 20, 16, 16)
    frames = take_frames(clips)
    by_frame = [[each.score for each in view(frames[:, at], TASKS)] for at in range(8)]
    scores = [each.score for each in view(clips, TASKS)]
    assert scores == pytest.approx(np.mean(by_frame, axis=0), abs=1e-5)
    gray = pictures(1, 16, 16)
    assert view(gray, TASKS) == view(gray.repeat(3, axis=1), TASKS)


def test_another_model_gives_another_score(tmp_path: Path, data: Path):
    save_clip(data / "other", seed=1)
    images = pictures(3, 16, 16)
    other = viewer(tmp_path, data, path="other")
    assert raw(other(images, TASKS)) != raw(viewer(tmp_path, data)(images, TASKS))


def llama(directory: Path) -> None:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def truncated(directory: Path) -> None:
    save_clip(directory)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def without_processor(directory: Path) -> None:
    save_clip(directory)
    for path in directory.glob("*processor*"):
        path.unlink()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda directory: None,
            r"reward\.judges\[0\]\.model\.path must be a directory, .*wrong is not",
        ),
        (Path.mkdir, r"reward\.judges\[0\]\.model .*wrong' cannot be loaded: "),
        (llama, r"reward\.judges\[0\]\.model .*wrong' cannot be loaded: "),
        (truncated, r"reward\.judges\[0\]\.model .*wrong' cannot be loaded: "),
        (without_processor, r"reward\.judges\[0\]\.model .*wrong' cannot be loaded: "),
    ],
)
def test_a_wrong_directory_is_one_line(tmp_path: Path, make, message: str):
    make(tmp_path / "wrong")
    params = params_of(tmp_path, path="wrong")
    with pytest.raises(ParameterError, match=message) as raised:
        build_reward(params, tmp_path)
    assert "\n" not in str(raised.value)


def test_weights_of_another_class_are_not_drawn_at_random(tmp_path: Path, data: Path):
    """A CLIP whose text tower is missing loads in transformers, with a warning."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(data / "clip", tmp_path / "half")
    weights = tmp_path / "half" / "model.safetensors"
    kept = {name: each for name, each in load_file(weights).items() if "text_model" not in name}
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(ParameterError, match=r"it has no text_model\..*, which a CLIPModel has"):
        build_reward(params_of(tmp_path, path="half"), tmp_path)


def test_the_score_stage_exits_in_one_line(tmp_path: Path):
    (tmp_path / "params.yaml").write_text(dump_yaml(content_of(path="nothing")))
    (tmp_path / "judge.json").write_text("{}")
    result = subprocess.run(
        [sys.executable, "-m", "stages.score", "judge.json", "prompts", "rollouts", "out"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "params.yaml: reward.judges[0].model.path must be a directory, data/nothing is not"
    ]
