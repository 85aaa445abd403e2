"""What a judge of texts does to its process: each text gets a status, and the others are judged."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from grpo.errors import ParameterError
from grpo.params.parameters import read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.rewards._reward_functions import judge_of_function
from grpo.rewards.base import JudgeInputs, Task
from grpo.runtime.artifacts.files import exclusive
from grpo.sampling.judge_process import FILE_BYTES, MEMORY_GB
from grpo.sampling.judging import JointJudge, LimitedJudge, TextJudge
from grpo.sampling.outcomes import Outcome
from grpo.schema import DATA, Machine
from grpo.wiring.rewards import build_judges

ROOT = Path(__file__).parents[2]
TASK = Task(family="f", prompt="p", answer="6", entry={})
MACHINE = Machine(device="cpu", dtype="float32", threads=1, compile=False)
MEBIBYTE = 2**20
SLEEP = ["sleep", f"600.{os.getpid()}"]
hoard: list[object] = []  # grows in the judge's process


def fill_memory() -> None:
    """As a comparison that expands a power; each part is written to, and so takes memory."""
    while True:
        hoard.append(bytearray(64 * MEBIBYTE))


def fill_memory_quietly() -> None:
    """A judge that catches the error still holds what it allocated."""
    try:
        fill_memory()
    except MemoryError:
        raise RuntimeError("it did not work") from None


def print_a_gigabyte() -> None:
    line = "x" * (MEBIBYTE - 1)
    for _ in range(512):
        print(line)
        print(line, file=sys.stderr)


def print_from_another_process() -> None:
    subprocess.run(["head", "-c", "1000000000", "/dev/zero"], check=True)


def write_a_file() -> None:
    with tempfile.TemporaryFile() as file:
        file.seek(2 * FILE_BYTES)
        file.write(b"x")
        file.flush()


def recurse() -> None:
    recurse()


def recurse_in_c() -> None:
    """Overflows the stack of the process."""
    nested: Iterator[int] = iter([1])
    for _ in range(10**6):
        nested = map(int, nested)
    next(nested)


def kill_itself(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fork_and_return() -> None:
    """Two processes go on where one was."""
    os.fork()


def start_a_process() -> None:
    subprocess.Popen(SLEEP)
    os._exit(1)


def hold_for_good() -> None:
    while True:
        with suppress(BaseException):
            time.sleep(600)


FAULTS: dict[str, tuple[Callable[[], object], str, str]] = {
    "memory": (fill_memory, "failed", "needs more than 0.5 GB of memory; raise reward.memory_gb"),
    "quiet": (fill_memory_quietly, "failed", "RuntimeError: it did not work"),
    "exit": (lambda: os._exit(3), "failed", "ended its process, exit code 3"),
    "exit 0": (lambda: os._exit(0), "failed", "ended its process, exit code 0"),
    "kill": (kill_itself(signal.SIGKILL), "failed", "ended its process, exit code -9"),
    "abort": (os.abort, "failed", "ended its process, exit code -6"),
    "terminate": (kill_itself(signal.SIGTERM), "failed", "ended its process, exit code -15"),
    "stop": (kill_itself(signal.SIGSTOP), "timed_out", ""),
    "sleep": (lambda: time.sleep(600), "timed_out", ""),
    "hold": (hold_for_good, "timed_out", ""),
    "recurse": (recurse, "failed", "RecursionError: maximum recursion depth exceeded"),
    "recurse in C": (recurse_in_c, "failed", "ended its process, exit code -11"),
    "file": (write_a_file, "failed", "OSError: [Errno 27] File too large"),
    "start": (start_a_process, "failed", "ended its process, exit code 1"),
}  # fmt: skip
COMMON = ("memory", "exit", "kill", "sleep", "file")  # in every run of the tests
HARMLESS = {"print": print_a_gigabyte, "print elsewhere": print_from_another_process}


def misbehave(answer: str, task: Task) -> float:
    if answer in FAULTS:
        FAULTS[answer][0]()
    HARMLESS.get(answer, str)()
    return len(answer) / 100


def judge_of(judge: Callable[[str, Task], float], timeout_seconds: float = 10.0) -> TextJudge:
    return TextJudge(judge, answer_pattern=None, timeout_seconds=timeout_seconds, memory_gb=0.5)


def judged(*texts: str, timeout_seconds: float = 10.0) -> list[Outcome]:
    return [*judge_of(misbehave, timeout_seconds).judge_texts(texts, [TASK] * len(texts))]


def misbehave_together(completions: list[str], answer: list[str]) -> list[float]:
    """A reward function of TRL's convention."""
    return [misbehave(text, TASK) for text in completions]


def judged_together(*texts: str, timeout_seconds: float = 10.0) -> list[Outcome]:
    judge = judge_of_function("misbehave_together", misbehave_together)
    read = judge.load(JudgeInputs(where="reward", model=None, data=DATA, machine=MACHINE))
    joint = JointJudge(view=read, reads_media=False)
    limited = LimitedJudge(joint, timeout_seconds=timeout_seconds, memory_gb=0.5)
    return [*limited.judge_texts(texts, [TASK] * len(texts))]


@pytest.fixture(autouse=True)
def _leaves_no_process() -> Iterator[None]:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    yield
    commands = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert SLEEP not in commands
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    "fault",
    [each if each in COMMON else pytest.param(each, marks=pytest.mark.long) for each in FAULTS],
)
def test_a_fault_is_the_status_of_its_text_alone(fault: str):
    _, status, detail = FAULTS[fault]
    seconds = 0.3 if status == "timed_out" else 10.0
    first, faulty, last = judged("first", fault, "last!", timeout_seconds=seconds)
    assert first == last == Outcome(0.05, "scored")
    assert (faulty.score, faulty.status) == (0.0, status)
    assert faulty.detail.startswith(detail)


@pytest.mark.parametrize(
    "fault",
    [
        *("memory", "sleep"),
        *(pytest.param(each, marks=pytest.mark.long) for each in ("exit", "hold", "recurse")),
    ],
)
def test_a_fault_of_a_reward_function_is_the_status_of_its_text_alone(fault: str):
    """The function gets the faulty text in one call with others, and no other is lost."""
    _, status, detail = FAULTS[fault]
    seconds = 0.1 if status == "timed_out" else 10.0
    texts = [f"{n:05d}" for n in range(20)]
    texts[7] = fault
    outcomes = judged_together(*texts, timeout_seconds=seconds)
    faulty = outcomes.pop(7)
    assert outcomes == [Outcome(0.05, "scored")] * 19
    assert (faulty.score, faulty.status) == (0.0, status)
    assert faulty.detail.startswith(detail)


@pytest.mark.long
def test_faults_together_give_the_same_outcomes_in_any_order():
    """Whatever the process of a text judged before, as after a rerun from a later shard."""
    faults = [each for each in FAULTS if FAULTS[each][1] == "failed"]
    texts = [each for fault in faults for each in (fault, f"good {fault}")]
    outcomes = dict(zip(texts, judged(*texts)))
    assert [outcomes[each].status for each in faults] == [FAULTS[each][1] for each in faults]
    assert all(outcomes[f"good {each}"].status == "scored" for each in faults)
    assert dict(zip(texts[::-1], judged(*texts[::-1]))) == outcomes


@pytest.mark.parametrize("text", HARMLESS)
def test_a_gigabyte_of_output_is_dropped(text: str, capfd: pytest.CaptureFixture[str]):
    (outcome,) = judged(text, timeout_seconds=30.0)
    assert outcome.status == "scored"
    assert capfd.readouterr() == ("", "")


def test_memory_that_earlier_texts_left_behind_decides_about_no_text():
    """Each text leaves 200 MB of the 500 MB, so that every third one needs a new process."""

    def keep(answer: str, task: Task) -> float:
        hoard.append(bytearray(190 * MEBIBYTE))
        return float(answer) / 10

    texts = [str(n) for n in range(8)]
    judge = judge_of(keep)
    outcomes = [*judge.judge_texts(texts, [TASK] * 8)]
    assert outcomes == [Outcome(n / 10, "scored") for n in range(8)]
    assert hoard == []


def test_a_fork_that_the_judge_makes_answers_no_text():
    def fork(answer: str, task: Task) -> float:
        fork_and_return()
        return float(answer) / 10

    texts = [str(n) for n in range(5)]
    outcomes = [*judge_of(fork).judge_texts(texts, [TASK] * 5)]
    assert outcomes == [Outcome(n / 10, "scored") for n in range(5)]


def test_a_judge_that_outlives_its_stage_does_not_block_the_next_one(tmp_path: Path):
    judge = judge_of(misbehave)
    with exclusive(tmp_path / "lock", "a stage"):
        assert [*judge.judge_texts(["x"], [TASK])] == [Outcome(0.01, "scored")]
    with exclusive(tmp_path / "lock", "the next stage"):  # the judge's process is still alive
        pass


def test_the_limit_is_on_top_of_what_the_stage_has_and_leaves_the_stage_alone():
    """A stage with a large table forks a judge that needs little."""
    table = bytearray(700 * MEBIBYTE)
    before = [resource.getrlimit(each) for each in (resource.RLIMIT_DATA, resource.RLIMIT_CORE)]

    def measure(answer: str, task: Task) -> float:
        hoard.append(bytearray(100 * MEBIBYTE))
        return float(resource.getrlimit(resource.RLIMIT_CORE)[0] == 0)

    (outcome,) = judge_of(measure).judge_texts(["x"], [TASK])
    assert outcome == Outcome(1.0, "scored")
    assert len(table) == 700 * MEBIBYTE
    after = [resource.getrlimit(each) for each in (resource.RLIMIT_DATA, resource.RLIMIT_CORE)]
    assert after == before


def test_the_parameter_sets_the_limit_and_needs_a_judge_with_a_process(tmp_path: Path):
    content = parse_yaml((ROOT / "recipes/smoke.yaml").read_text())
    assert MEMORY_GB == 4.0
    path = tmp_path / "params.yaml"
    for stated, expected in ((None, MEMORY_GB), (1.5, 1.5)):
        content["reward"].pop("memory_gb", None)
        if stated is not None:
            content["reward"]["memory_gb"] = stated
        path.write_text(dump_yaml(content))
        params = read_params(path)
        assert ("memory_gb" in params.model_dump()["reward"]) == (stated is not None)
        (judge,) = build_judges(params, tmp_path, "reward").values()
        assert isinstance(judge, TextJudge)
        assert judge.process.memory_gb == expected
    content["reward"] |= {"answer_pattern": None, "timeout_seconds": None}
    content["reward"]["judges"][0] |= {
        "judge": "reward_model",
        "model": {"source": "directory", "path": "model"},
        "score_range": [0.0, 1.0],
    }
    path.write_text(dump_yaml(content))
    with pytest.raises(ParameterError, match=r"reward.memory_gb must be removed with judge reward"):
        read_params(path)
