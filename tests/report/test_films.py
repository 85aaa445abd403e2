"""Laws of films: they show the stored actions, one cell per chunk, or there is no film."""

import base64
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from finished_run import cost

from grpo.errors import ArtifactError
from grpo.modalities.action_chunks.films import MAX_SHOTS, read_films
from grpo.modalities.action_chunks.model import ChunkShape
from grpo.modalities.action_chunks.simulation.base import Ending
from grpo.modalities.action_chunks.simulation.metaworld import MetaWorld, make_expert
from grpo.modalities.action_chunks.simulation.replay import replay
from grpo.modalities.action_chunks.simulation.sizes import ACTIONS, OBSERVATIONS
from grpo.modalities.shared.exhibits import Film
from grpo.params.parameters import Parameters, read_params
from grpo.report.page import PAGE, write_page
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.media import encode_png
from grpo.runtime.artifacts.stored_iterations import first_iteration
from grpo.runtime.artifacts.tables import PROMPTS, read_table, write_table
from grpo.runtime.artifacts.tensors import read_tensors, write_tensors

SHAPE = ChunkShape(
    observations=OBSERVATIONS, pixels=0, length=8, actions=ACTIONS, bins=33, positions=1
)
SCENE = "reach | 0.0 0.6 0.02 0.1 0.8 0.2"
STILL, CLOSING = 16, 32  # bins of 0 and of 1
IDLE_CHUNKS = 12  # of the rollout that never gets there
KEPT = [0.25, 1.0, 0.5, 0.75, 0.125]  # by phase
ROUNDS = ("uniform-1", "sgpo-1")
CHOSEN = {"solved": 2, "not solved": 3, "crashed": 1}  # rows
IMAGE = re.compile(r'<img src="data:image/png;base64,([^"]+)"')
HEIGHT = re.compile(r"--kept: (\d+)%")
TITLE = re.compile(r'<div title="chunk (\d+): ([^"]+)"')

Change = Callable[[dict[str, torch.Tensor]], None]


@dataclass(frozen=True, kw_only=True)
class Robot:
    """A finished run of a robot's policy."""

    artifacts: Path
    params: Parameters
    page: str
    solving: torch.Tensor  # bins of the rollout that reaches the goal, by chunk
    executed: list[int]  # of it


def solve() -> tuple[torch.Tensor, list[int]]:
    """Returns an expert's chunks in bins until it is there, and how much of each it needed."""
    player, expert = MetaWorld(), make_expert("reach-v3")
    observation, is_solved, done = player.start(SCENE), False, []
    while not is_solved:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it remarks on every action that is to be clipped
            action = np.clip(expert.get_action(observation), -1, 1)
        bins = np.rint((action + 1) / 2 * (SHAPE.bins - 1))
        done.append(bins)
        observation, is_solved = player.step((bins / (SHAPE.bins - 1) * 2 - 1).tolist())
    left = -len(done) % SHAPE.length
    chunks = np.array(done + [done[-1]] * left).reshape(-1, SHAPE.tokens)
    return torch.from_numpy(chunks).long(), [8] * (len(chunks) - 1) + [8 - left]


def write_tensors_of(
    artifacts: Path, name: str, solving: torch.Tensor, executed: list[int]
) -> None:
    """Writes a round: one rollout idle, one crashed, one that solves, one that idles for long."""
    idle = torch.full((IDLE_CHUNKS, SHAPE.tokens), STILL)
    idle[4:6, ACTIONS - 1 :: ACTIONS] = CLOSING  # the gripper, in two whole chunks
    action = torch.cat([idle[:1], solving, idle])
    count = len(action)
    tensors = {
        "instruction": torch.ones(2, dtype=torch.long),
        "instruction_length": torch.ones(2, dtype=torch.long),
        "steps": torch.tensor([1, 0, len(solving), IDLE_CHUNKS]),
        "ending": torch.tensor(
            [Ending.STEP_LIMIT, Ending.FAILED, Ending.SUCCESS, Ending.STEP_LIMIT]
        ).long(),
        "observation": torch.zeros(count, SHAPE.observations),
        "picture": torch.zeros(count, 3, 0, 0, dtype=torch.uint8),
        "action": action,
        "executed": torch.tensor([8, *executed, *[8] * IDLE_CHUNKS]),
        "behavior_logp": torch.zeros(count),
    }
    write_tensors(artifacts / f"rollouts/{name}/tensors.safetensors", tensors)


def change_tensors(artifacts: Path, change: Change) -> None:
    """Changes what the round without filters stored."""
    path = artifacts / "rollouts/sgpo-1/tensors.safetensors"
    tensors = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors)


def write_policy(artifacts: Path, name: str, objective_state: dict[str, Any]) -> None:
    whose = {"name": name, "arm": name.partition("-")[0], "start": "base"}
    state = {**whose, "objective_state": objective_state, "cost": cost(0)}
    write_json(artifacts / f"policies/{name}/state.json", state)


def keeps(link: str) -> dict[str, Any]:
    return {link: {f"keep_{phase}": kept for phase, kept in enumerate(KEPT)}}


@pytest.fixture(scope="module")
def robot(finished: Path, params: Parameters, tmp_path_factory: pytest.TempPathFactory) -> Robot:
    """Two rounds of the finished run as if they were a robot's, one of which keeps by phase."""
    artifacts = tmp_path_factory.mktemp("robot") / "artifacts"
    shutil.copytree(finished, artifacts)
    recipe = read_params(Path(__file__).parents[2] / "recipes" / "manipulation.yaml")
    changed = params.model_copy(
        update={
            "task": recipe.task,
            "policy": recipe.policy.model_copy(update={"phases": "gripper"}),
            "reward": recipe.reward,
            "arms": dict.fromkeys(params.arms, recipe.arms["all"]),
            "rounds": {name: params.rounds[name] for name in ROUNDS},
        }
    )
    path = artifacts / "prompts/train.parquet"
    write_table(read_table(path, PROMPTS).assign(prompt=SCENE), path, PROMPTS)
    write_json(artifacts / "policies/base/actions.json", SHAPE._asdict())
    solving, executed = solve()
    for name in ROUNDS:
        write_tensors_of(artifacts, name, solving, executed)
        write_policy(artifacts, name, keeps("sample_chunks_by_phase") if name == "sgpo-1" else {})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(artifacts.parent)
        write_page(artifacts, changed, artifacts / "report")
    page = (artifacts / "report" / PAGE).read_text()
    return Robot(artifacts=artifacts, params=changed, page=page, solving=solving, executed=executed)


def films_of(robot: Robot, artifacts: Path, kinds: list[str]) -> list[Film | None]:
    """Returns films of the round that keeps by phase."""
    rollouts = pd.DataFrame({"group": [0, 0, 1, 1]})
    rows = [
        {"row": CHOSEN[each], "rollout_id": f"sgpo-1-{CHOSEN[each]}", "prompt": SCENE}
        for each in kinds
    ]
    return read_films(
        artifacts, robot.params, first_iteration(artifacts, "sgpo-1"), rollouts, pd.DataFrame(rows)
    )


@pytest.fixture
def changeable(robot: Robot, tmp_path: Path) -> Path:
    """A copy to change of what films are read from."""
    for name in ("rollouts/sgpo-1", "policies"):
        shutil.copytree(robot.artifacts / name, tmp_path / "artifacts" / name)
    return tmp_path / "artifacts"


def section(page: str) -> str:
    return page.partition('<section id="rollouts">')[2].partition("</section>")[0]


def test_a_film_shows_the_rollout_from_its_scene_to_its_end(robot: Robot) -> None:
    values = (robot.solving / 16 - 1).view(-1, SHAPE.length, ACTIONS).tolist()
    chunks = [chunk[:count] for chunk, count in zip(values, robot.executed)]
    assert len(chunks) < MAX_SHOTS  # so that all of it is shown
    again = replay(SCENE, chunks, shown=range(len(chunks) + 1))
    assert again.moments[-1].ending == Ending.SUCCESS
    wanted = [
        base64.b64encode(encode_png(each.transpose(2, 0, 1))).decode() for each in again.frames
    ]
    found = IMAGE.findall(section(robot.page))
    per_round = len(wanted) + MAX_SHOTS  # of the other, longer one
    assert len(found) == per_round * len(ROUNDS)
    assert found[: len(wanted)] == found[per_round:][: len(wanted)] == wanted


def test_every_chunk_has_a_cell_of_its_phase_and_as_high_as_it_was_kept(robot: Robot) -> None:
    shown = section(robot.page)
    # Idle but for chunks 5 and 6, which grip: three around a grip are near, and none of them touch.
    grip = [*["approach"] * 4, *["active-grip"] * 2, *["release-ramp"] * 3, *["tail"] * 3]
    still = ["approach"] * len(robot.solving)
    cells = TITLE.findall(shown)
    assert [int(number) for number, _ in cells] == 2 * [
        *range(1, len(still) + 1),
        *range(1, IDLE_CHUNKS + 1),
    ]
    assert [said.partition(",")[0] for _, said in cells] == 2 * (still + grip)
    kept = dict(zip(("approach", "active-grip", "release-ramp", "tail"), (25, 50, 75, 12)))
    heights = list(map(int, HEIGHT.findall(shown)))
    assert heights == [100] * len(still + grip) + [kept[phase] for phase in still + grip]
    assert shown.count("keep probability") == len(still + grip)


def test_a_reader_hears_the_phases_in_their_order(robot: Robot) -> None:
    said = "12 chunks: 4 of approach, 2 of active-grip, 3 of release-ramp, 3 of tail"
    assert section(robot.page).count(f'role="img" aria-label="{said}"') == len(ROUNDS)


def test_a_long_rollout_is_shown_in_a_few_shots_its_start_and_end_among_them(
    robot: Robot, changeable: Path
) -> None:
    (film,) = films_of(robot, changeable, ["not solved"])
    assert film is not None
    numbers = [each.cell.number for each in film.shots if each.cell]
    assert len(film.shots) == MAX_SHOTS == len(numbers) + 1
    assert numbers[0] == 1
    assert film.shots[-1].cell is None
    assert len(film.cells) == IDLE_CHUNKS


def test_a_rollout_whose_environment_failed_has_no_film(robot: Robot, changeable: Path) -> None:
    assert films_of(robot, changeable, ["crashed"]) == [None]


def test_an_arm_that_keeps_one_phase_shows_no_other_as_kept(robot: Robot, changeable: Path) -> None:
    write_policy(changeable, "sgpo-1", keeps("keep_highest_phase"))
    (film,) = films_of(robot, changeable, ["solved"])
    assert film is not None
    # Pre-grasp has the highest chance, 1, and all of this rollout is approach.
    assert {each.kept for each in film.cells} == {0.0}


def test_a_page_with_films_fetches_nothing_and_runs_its_own_script(robot: Robot) -> None:
    links = re.findall(r'(?:src|href)="([^"]*)"', robot.page)
    assert all(each.startswith(("#", "data:image/png;base64,")) for each in links)
    own = {"<script>", '<script type="application/json" id="rollout-data">'}
    assert set(re.findall("<script[^>]*>", robot.page)) <= own


def set_to(name: str, index: int, value: int) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to("action", 0, SHAPE.bins), r"action must be in \[0, 33\)"),
        (set_to("executed", 0, 0), r"executed must be in \[1, 8\]"),
        (set_to("steps", 0, 2), "observation must have"),
        (lambda tensors: tensors.pop("ending"), "must hold"),
    ],
)
def test_tensors_that_do_not_fit_are_named_in_one_line(
    robot: Robot, changeable: Path, change: Change, message: str
) -> None:
    change_tensors(changeable, change)
    with pytest.raises(ArtifactError, match=rf"sgpo-1/tensors\.safetensors: {message}") as caught:
        films_of(robot, changeable, ["solved", "not solved"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "still_shown"),
    [
        # It never got there; it did; it did in a later chunk than an action fewer leads to.
        (set_to("ending", 3, Ending.SUCCESS), "solved"),
        pytest.param(set_to("ending", 2, Ending.STEP_LIMIT), "not solved", marks=pytest.mark.long),
        pytest.param(set_to("executed", 1, 1), "not solved", marks=pytest.mark.long),
    ],
)
def test_a_rollout_that_ends_otherwise_when_it_is_played_again_has_chunks_and_no_shots(
    robot: Robot, changeable: Path, change: Change, still_shown: str
) -> None:
    change_tensors(changeable, change)
    kinds = ["solved", "not solved"]
    films = dict(zip(kinds, films_of(robot, changeable, kinds), strict=True))
    assert [kind for kind, film in films.items() if film and film.shots] == [still_shown]
    assert all(film and film.cells for film in films.values())


@pytest.mark.parametrize(
    ("file", "key", "message"),
    [
        ("policies/base/actions.json", "bins", "must hold the fields of a chunk's shape"),
        ("policies/sgpo-1/state.json", "objective_state", "must hold keep_0 to keep_4"),
        ("policies/sgpo-1/state.json", "cost", "must hold the fields of a policy state"),
    ],
)
def test_a_broken_policy_is_named_in_one_line(
    robot: Robot, changeable: Path, file: str, key: str, message: str
) -> None:
    content = read_json(changeable / file)
    content[key] = {"sample_chunks_by_phase": {"keep_0": 1.0}}
    if key != "objective_state":
        del content[key]
    write_json(changeable / file, content)
    with pytest.raises(ArtifactError, match=rf"{file}: .*{message}") as caught:
        films_of(robot, changeable, ["solved"])
    assert "\n" not in str(caught.value)
