"""The memory that `grpo check` predicts: laws of dry runs, limits, and what processes take."""

import gc
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import memory as measured
from grpo import __main__ as commands
from grpo.errors import ParameterError
from grpo.modalities.shared.optimizer import optimized_tensors
from grpo.modalities.shared.recomputation import saved_bytes
from grpo.modalities.tokens.bases import make_base
from grpo.params.parameters import Parameters, read_params
from grpo.params.recipes import read_content
from grpo.params.yaml import dump_yaml, value_at
from grpo.runtime.dry_run import DryRun
from grpo.schema import DATA
from grpo.wiring.memory import PolicyMemory, UpdateMemory, draw_prompts
from grpo.wiring.policies import draws_of_arm, make_optimizer
from grpo.wiring.stage_memory import COLUMNS, measure_stages, require_memory

ROOT = Path(__file__).parents[1]
FLOAT = 4  # bytes


def changed(params: Parameters, section: str, **values: Any) -> Parameters:
    part = getattr(params, section).model_copy(update=values)
    return params.model_copy(update={section: part})


@pytest.fixture(scope="module")
def params() -> Parameters:
    return read_params(ROOT / "recipes" / "smoke.yaml")


@pytest.fixture(scope="module")
def memory(params: Parameters) -> PolicyMemory:
    return PolicyMemory(params)


@pytest.fixture(scope="module")
def updates(params: Parameters, memory: PolicyMemory) -> UpdateMemory:
    return memory.updates(next(iter(params.arms)))


def test_a_dry_run_counts_what_is_live_at_the_same_time():
    run, layer = DryRun(), nn.Linear(2000, 3000, bias=False)
    run.place(layer)
    weight = FLOAT * 2000 * 3000
    assert run.live_bytes == weight

    def work() -> None:
        row = torch.zeros(500, 2000)  # 4 MB
        hidden = layer(row)  # 6 MB
        del row  # saved for the gradient of the weight
        hidden.relu().sum().backward()  # relu: 6 MB; gradients: 6 MB each, and the weight's

    peak = run.peak_of(work)
    sizes = {"row": 500 * 2000, "hidden": 500 * 3000, "weight": 2000 * 3000}
    assert run.live_bytes == weight + FLOAT * sizes["weight"]  # its gradient stays
    expected = sizes["row"] + 2 * sizes["hidden"] + sizes["weight"]
    assert peak - weight == pytest.approx(FLOAT * expected, rel=0.2)
    assert peak - weight >= FLOAT * (sizes["row"] + sizes["hidden"] + sizes["weight"])


def test_a_dry_run_saves_for_the_backward_pass_what_a_real_one_saves(params: Parameters):
    torch.manual_seed(0)
    tokens = torch.zeros(2, 24, dtype=torch.long)
    model, _ = make_base(params, DATA)
    with saved_bytes(model) as saved:
        output = model(input_ids=tokens, use_cache=False).logits
    assert output.requires_grad
    run = DryRun()
    run.place(model)
    before = run.live_bytes
    with run:
        output = model(input_ids=tokens, use_cache=False).logits
        assert output.requires_grad
    kept = run.live_bytes - before
    assert saved.total <= kept <= 1.05 * saved.total + output.nbytes


def test_numbers_of_a_dry_run_cannot_be_read_outside_of_it():
    run, layer = DryRun(), nn.Linear(3, 3)
    run.place(layer)
    with pytest.raises(RuntimeError, match="needs numbers"):
        layer.weight.sum()


def test_weights_and_states_are_those_of_the_real_class(params: Parameters, memory: PolicyMemory):
    model, _ = make_base(params, DATA)
    ends: Any = memory.policy
    held = [*model.parameters(), *model.buffers(), ends.end_tokens]
    assert memory.weights == sum(each.nbytes for each in held)
    optimizer = make_optimizer(model, next(iter(params.arms.values())).training)
    for each in optimized_tensors(optimizer):
        each.grad = torch.ones_like(each)
    optimizer.step()
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    states = memory.states(ranks=1)
    assert states["moments"] == sum(each.nbytes for each in moments)
    assert states["gradients"] == sum(each.nbytes for each in optimized_tensors(optimizer))
    assert states["copies"] == 0
    half = memory.states(ranks=2)
    assert half == {name: size / 2 for name, size in states.items()}


@pytest.mark.parametrize("recompute", [False, True])
def test_the_memory_of_a_microbatch_is_linear_in_its_rollouts(
    updates: UpdateMemory, recompute: bool
):
    few, more, most = (updates.peak(rows, recompute=recompute) for rows in (16, 32, 48))
    assert most - more == pytest.approx(more - few, rel=0.01)


def test_recomputation_takes_less(updates: UpdateMemory):
    assert updates.peak(32, recompute=True) < updates.peak(32, recompute=False)


@pytest.mark.parametrize("room", [1e5, 1e6, 7e6])
def test_the_largest_microbatch_fits_and_one_more_rollout_does_not(
    updates: UpdateMemory, room: float
):
    rows = updates.largest_rows(room, recompute=False)
    assert updates.peak(rows + 1, recompute=False) > room
    assert rows == 0 or updates.peak(rows, recompute=False) <= room


def test_more_rollouts_at_once_take_more(params: Parameters, memory: PolicyMemory):
    draws = draws_of_arm(params, next(iter(params.arms)))
    few, more = (
        max(memory.sampling(draws, rollouts=count, group_size=4).values()) for count in (16, 64)
    )
    assert few < more < 4.5 * few


def limited(params: Parameters, above: float) -> Parameters:
    """Returns parameters with a limit of some bytes above Python and its libraries."""
    found = measure_stages(params)
    assert found is not None
    return changed(params, "machine", memory_gb=(found.libraries + above) / 1e9)


def test_a_microbatch_that_cannot_fit_is_refused_with_one_that_does(
    params: Parameters,
):
    (arm,) = list(params.arms)[:1]
    settings = params.arms[arm]
    training = settings.training.model_copy(update={"tokens_per_microbatch": 20_000})
    wide = params.model_copy(
        update={"arms": {arm: settings.model_copy(update={"training": training})}}
    )
    shown: list[str] = []
    with pytest.raises(ParameterError) as refused:
        require_memory(limited(wide, above=20e6), show=shown.append)
    message = str(refused.value)
    assert message.startswith(f"params.yaml: arms.{arm}.training.tokens_per_microbatch must be at")
    assert "\n" not in message
    fitting = int(message.partition("at most ")[2].split()[0])
    assert 0 < fitting < 20_000
    lower = settings.training.model_copy(update={"tokens_per_microbatch": fitting // 2})
    fits = wide.model_copy(update={"arms": {arm: settings.model_copy(update={"training": lower})}})
    require_memory(limited(fits, above=20e6), show=shown.append)
    assert "largest microbatch" in shown[-1]


def test_a_policy_of_which_nothing_fits_is_refused_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = (ROOT / "recipes" / "smoke.yaml").read_text()
    file = tmp_path / "small.yaml"
    file.write_text(text.replace("compile: false}", "compile: false, memory_gb: 0.001}"))
    monkeypatch.setattr(sys, "argv", ["grpo", "check", str(file)])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"{file}: machine.memory_gb must be more than 0.001")


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("task.families.gcd.min_wordz", 3, "task.families.gcd must be a reasoning-gym family"),
        ("task.families.nonsense", {}, "task.families.nonsense has no steps notation"),
        ("policy.base.architecture", "LlamaForCausalLMM", "policy.base.architecture must be"),
        ("policy.base.config.hidden_sizes", 64, "policy.base.config.hidden_sizes is unknown"),
        ("policy.base.config.num_attention_heads", 7, "policy.base.config is refused"),
    ],
)
def test_the_command_refuses_a_task_or_policy_that_cannot_be_built(
    path: str,
    value: Any,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    content = read_content(ROOT / "params.yaml")
    above, _, key = path.rpartition(".")
    value_at(content, above)[key] = value
    file = tmp_path / "wrong.yaml"
    file.write_text(dump_yaml(content))
    monkeypatch.setattr(sys, "argv", ["grpo", "check", str(file)])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{file}: {sentence}")


def test_a_small_task_is_not_asked_for_more_prompts_than_it_makes(tmp_path: Path):
    content = read_content(ROOT / "recipes" / "smoke.yaml")
    few = {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 5}  # 25 prompts
    content["task"] |= {"train_prompts": 10, "eval_prompts": 4, "families": {"gcd": few}}
    file = tmp_path / "few.yaml"
    file.write_text(dump_yaml(content))
    assert 0 < len(draw_prompts(read_params(file), DATA)) <= 10


def test_the_table_is_narrow_and_names_each_stage_once(params: Parameters):
    shown: list[str] = []
    require_memory(params, show=shown.append)
    (table,) = shown
    assert max(map(len, table.splitlines())) <= COLUMNS
    for stage in ("rollout@", "train@", "evaluate"):
        assert table.count(stage) == 1


def test_a_model_that_is_not_on_this_machine_is_said_to_be_unknown():
    shown: list[str] = []
    require_memory(read_params(ROOT / "recipes" / "translation-nllb.yaml"), show=shown.append)
    (line,) = shown
    assert line.startswith("memory is not computed: ")


def live_peak(work: Callable[[], object]) -> int:
    """Returns the largest bytes that are live in torch's allocator while work runs."""
    gc.collect()  # what is freed meanwhile would be subtracted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    results = profiled.profiler.kineto_results
    assert results is not None
    events: list[Any] = [each for each in results.events() if each.name() == "[memory]"]
    ordered = sorted(events, key=lambda each: each.start_ns())
    return max(accumulate(each.nbytes() for each in ordered))


def case_of(modality: str, variant: str, size: str) -> dict[str, Any]:
    wanted = modality, variant, size
    (found,) = (
        each
        for each in measured.cases()
        if (each["modality"], each["variant"], each["size"]) == wanted
    )
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("modality", "variant", "size"),
    [
        *((each, "float32", "small") for each in measured.MODALITIES),
        *(("tokens", each, "medium") for each in ("bfloat16", "recompute", "LoRA")),
    ],
)
def test_a_dry_run_of_updates_counts_what_torch_allocates(
    modality: str, variant: str, size: str, tmp_path: Path
):
    """A dry run adds gradients of microbatches out of place, and so counts up to 8 % more."""
    case = case_of(modality, variant, size)
    given = measured.read(
        tmp_path / "params.yaml", case, {**case["changes"], **case["scaled"], **measured.LIMIT}
    )
    measured.make_base(given, tmp_path / "base")
    predicted = measured.predict(given, case["rows"])["update"]
    live = live_peak(
        lambda: measured.load_and_work(
            given, tmp_path / "base", "update", sampled=measured.SAMPLED, rows=case["rows"]
        )
    )
    assert 0.99 < predicted / live < 1.08


@pytest.mark.long
@pytest.mark.parametrize("modality", measured.MODALITIES)
def test_an_update_takes_what_is_predicted(modality: str):
    """In a fresh process: glibc first takes what earlier tests have freed, in fragments."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as fresh:
        rows = fresh.submit(measured.measure, case_of(modality, "float32", "medium")).result()
    (update,) = (row for row in rows if row["work"] == "update")
    assert abs(update["predicted"] / update["measured"] - 1) < measured.TARGET
