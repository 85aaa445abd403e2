"""What workers are told, and what it does not depend on who they are."""

from pathlib import Path

import pytest

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.tokens.modality import DEFAULT_VLLM
from grpo.params.parameters import Parameters, read_params
from grpo.runtime.artifacts.files import write_bytes
from grpo.runtime.executors.base import Job
from grpo.schema import DATA
from grpo.wiring.executors import Setup, open_executor, receive
from grpo.wiring.sampling_workers import SamplingSetup
from stages.entry import scratch_of
from tests.runtime.work import make

ROOT = Path(__file__).parents[2]
RECIPES = sorted([*ROOT.glob("recipes/*.yaml"), ROOT / "params.yaml"])


class Marked(Setup):
    """A setup for `tests.runtime.work`."""

    marks: Path


def changed(executor: str, workers: int, device: str = "cpu", threads: int = 1) -> Parameters:
    """Returns the default parameters for another machine and other workers."""
    params = read_params(ROOT / "params.yaml")
    sampling = type(params.sampling).model_validate({"executor": executor, "workers": workers})
    machine = params.machine.model_copy(update={"device": device, "threads": threads})
    return params.model_copy(update={"sampling": sampling, "machine": machine})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_worker_reads_the_parameters_that_the_stage_has_read(path: Path):
    params = read_params(path)
    setup = SamplingSetup(
        params=params,
        prompts=Path("a.parquet"),
        purpose="round",
        round=next(iter(params.rounds)),
        base=Path("base"),
        policy=Path("policy"),
    )
    assert receive(SamplingSetup, setup.model_dump_json()) == setup


def test_a_worker_with_other_code_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_bytes(Path("grpo/a.py"), b"a = 1")
    line = Setup(params=read_params(ROOT / "params.yaml")).model_dump_json()
    assert receive(Setup, line)
    write_bytes(Path("grpo/a.py"), b"a = 2")
    with pytest.raises(ArtifactError, match="must be those that the stage started with"):
        receive(Setup, line)


def test_another_executor_goes_on_where_the_last_one_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    executors = [changed("local", 1), changed("processes", 4), changed("ray", 2)]
    assert len({scratch_of("rollout@a", [], each).directory for each in executors}) == 1
    assert scratch_of("rollout@a", [], changed("local", 1, threads=2)).directory not in {
        scratch_of("rollout@a", [], each).directory for each in executors
    }


def test_shards_judged_by_another_model_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    kept = []
    for model in (b"first", b"other"):
        write_bytes(DATA / "judge" / "model.onnx", model)
        kept.append(scratch_of("score@a", [DATA], changed("local", 1)).directory)
    assert kept[0] != kept[1]


def told(folder: Path, params: Parameters, name: str) -> set[str]:
    """Returns what two workers, each with a job, find in their environment."""
    outs = [folder / "out" / number for number in "01"]
    waits = [f"waits {outs[1]}", ""]
    jobs = [Job("tell", {"name": name, "what": w}, out) for w, out in zip(waits, outs)]
    with open_executor(make, Marked(params=params, marks=folder)) as executor:
        executor.finish(jobs)
    return {(out / "told.txt").read_text() for out in outs}


def test_every_worker_has_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a worker may see; that a GPU is there, no machine without one can tell."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c")
    params = changed("processes", 2, device="cuda")
    assert told(tmp_path, params, "CUDA_VISIBLE_DEVICES") == {"GPU-a", "GPU-b"}
    with pytest.raises(ParameterError, match=r"sampling\.workers must be at most 3, .* got 4"):
        told(tmp_path, changed("processes", 4, device="cuda"), "CUDA_VISIBLE_DEVICES")


def test_a_worker_has_the_gpus_of_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    params = changed("processes", 2, device="cuda")
    engine = DEFAULT_VLLM.model_copy(update={"tensor_parallel_size": 2})
    policy = params.policy.model_copy(update={"sampler": "vllm", "vllm": engine})
    params = params.model_copy(update={"policy": policy})
    assert told(tmp_path, params, "CUDA_VISIBLE_DEVICES") == {"0,1", "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ParameterError, match=r"at most 1, .* divided by the 2 of a sampler"):
        told(tmp_path, params, "CUDA_VISIBLE_DEVICES")


def test_workers_have_as_many_threads_as_the_stage(tmp_path: Path):
    params = changed("processes", 2, threads=3)
    assert told(tmp_path, params, "OMP_NUM_THREADS") == {"3"}
