"""What each stage needs of the memory of its device, as a table, and whether that fits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from grpo.errors import AbsentError, MissingExtraError, ParameterError, StorageError
from grpo.objective.penalty import needs_reference
from grpo.params.parameters import Parameters, Purpose
from grpo.rewards import find_judge
from grpo.runtime.artifacts.tensors import stored_numbers
from grpo.schema import DATA, PARAMS, DirectoryBase
from grpo.wiring.allocation import build_selection, curriculum_of, is_profile_needed
from grpo.wiring.memory import PolicyMemory, UpdateMemory
from grpo.wiring.objectives import build_objective
from grpo.wiring.policies import draws_of_arm, draws_of_evaluation, draws_of_profile

JUDGE_BYTES = 4  # per parameter: judges compute in float32
GB, MB = 1e9, 1e6
# What activations would take with the other value of policy.recompute, by its value.
OTHER = "activations, recompute: true", "activations, recompute: false"
CONTENTS = (
    *("weights", "copies", "gradients", "moments", "reference", "gathered", "judges"),
    *("sampling", "logits", "activations", *OTHER, "in all", "largest microbatch"),
)
COLUMNS = 100  # of a terminal
LONGEST_NAME = 24  # characters of the stages of a column


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The memory of one process of a stage, in bytes.

    Contents are not all there at once: gradients stay while the next rollouts are sampled.
    """

    stage: str
    processes: int  # that share the memory of the machine
    states: Mapping[str, float]  # there all the time
    working: Mapping[str, float]  # of passes; only the largest of its values counts, and logits
    other_activations: float | None = None  # with the other value of policy.recompute
    microbatch: int | None = None  # the largest tokens_per_microbatch that fits; 0: none

    @property
    def peak(self) -> float:
        """The largest bytes of the process, without Python and its libraries."""
        update = sum(self.working.get(each, 0.0) for each in ("activations", "logits"))
        return sum(self.states.values()) + max(update, self.working.get("sampling", 0.0))


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """The memory of the stages of a run."""

    stages: Sequence[StageMemory]
    libraries: float  # bytes of Python and its imports, of every process on the host
    misfit: str | None  # what must be changed to fit


def measure_stages(params: Parameters, data: Path = DATA) -> RunMemory | None:
    """Returns the memory of all stages that load a model; None: the modality has no dry runs.

    Raises:
      AbsentError: If a configuration or the prompts are not on this machine.
      ArtifactError: If a file of prompts is wrong.
      MissingExtraError: If a package is not installed.
      ParameterError: If the task or the policy is wrong.
      StorageError: If prompts cannot be downloaded.
    """
    memory = PolicyMemory(params, data)
    if memory.policy is None:
        return None
    machine = params.machine
    libraries = float(psutil.Process().memory_info().rss) if machine.device == "cpu" else 0.0
    limit = None if machine.memory_gb is None else machine.memory_gb * GB
    builder = _Stages(params, memory, data, libraries, limit)
    stages = list(builder.make())
    return RunMemory(stages=stages, libraries=libraries, misfit=builder.misfit)


class _Stages:
    """Makes the memory of each stage, and finds what does not fit."""

    def __init__(
        self,
        params: Parameters,
        memory: PolicyMemory,
        data: Path,
        libraries: float,
        limit: float | None,
    ) -> None:
        self._params, self._memory, self._data = params, memory, data
        self._libraries, self._limit = libraries, limit
        self.misfit: str | None = None  # what must be changed to fit, first of all
        self._sampled: dict[Any, dict[str, int]] = {}

    def make(self) -> Iterator[StageMemory]:
        """Yields the memory of each stage, in the order of the pipeline."""
        params = self._params
        weights = {"weights": float(self._memory.weights)}
        if is_profile_needed(params):
            yield self._sampling_stage(
                "profile",
                "profile.rollouts_per_batch",
                draws_of_profile(params),
                params.profile.rollouts_per_batch,
                params.profile.rollouts_per_prompt,
                weights,
            )
        for arm, settings in params.arms.items():
            yield self._sampling_stage(
                f"rollout@{arm}",
                f"arms.{arm}.sampling.rollouts_per_batch",
                draws_of_arm(params, arm),
                settings.sampling.rollouts_per_batch,
                self._group_size(arm),
                weights,
            )
        if judges := self._judges("reward"):
            yield StageMemory(stage="score", processes=self._workers, states=judges, working={})
        for arm in params.arms:
            yield self._training_stage(arm)
        yield self._sampling_stage(
            "evaluate",
            "evaluation.rollouts_per_batch",
            draws_of_evaluation(params)["sampled"],
            params.evaluation.rollouts_per_batch,
            params.evaluation.rollouts_per_prompt,
            {**weights, **self._judges("evaluation")},
        )

    @property
    def _workers(self) -> int:
        """Number of sampling processes that share the memory."""
        return self._params.sampling.workers if self._params.machine.device == "cpu" else 1

    def _room(self, processes: int, states: Mapping[str, float]) -> float | None:
        """Returns the bytes left for passes of one process; None: not limited."""
        if self._limit is None:
            return None
        return self._limit / processes - self._libraries - sum(states.values())

    def _group_size(self, arm: str) -> int:
        """Returns the smallest group size, of which most prompts are read together."""
        selection = build_selection(self._params.find_arm(arm).selection, arm)
        curriculum = curriculum_of(self._params, arm)
        return min(selection.sizes.union(*(each.sizes for each in curriculum)), default=1)

    def _sample(self, draws: Any, rollouts: int, group_size: int) -> float:
        """Returns the largest bytes of sampling a batch, without weights."""
        key = repr(draws), rollouts, group_size
        if key not in self._sampled:
            self._sampled[key] = self._memory.sampling(
                draws, rollouts=rollouts, group_size=group_size
            )
        return float(max(self._sampled[key].values()))

    def _sampling_stage(
        self,
        stage: str,
        path: str,
        draws: Any,
        rollouts: int,
        group_size: int,
        states: Mapping[str, float],
    ) -> StageMemory:
        """Returns the memory of a stage that samples.

        Args:
          path: Of the parameter that says how many rollouts are sampled together.
        """
        peak = self._sample(draws, rollouts, group_size)
        room = self._room(self._workers, states)
        made = StageMemory(
            stage=stage, processes=self._workers, states=states, working={"sampling": peak}
        )
        if room is not None and peak > room:
            fitting = _largest(
                lambda count: self._sample(draws, count * group_size, group_size) <= room,
                guess=max(0, int(room / peak * rollouts / group_size)),
                most=rollouts // group_size,
            )
            self._refuse(made, path, rollouts, fitting * group_size)
        return made

    def _training_stage(self, arm: str) -> StageMemory:
        params, memory, training = self._params, self._memory, self._params.arms[arm].training
        recompute, ranks = params.policy.recompute, training.ranks
        states = memory.states(ranks)
        if needs_reference(build_objective(params.arms[arm].objective, arm)):
            states["reference"] = states["weights"]
        if ranks > 1:
            states["gathered"] = sum(memory.gathered().values())
        working = dict[str, float]()
        if training.iterations_per_round > 1:  # later iterations are sampled and judged, too
            states |= self._judges("reward")
            if params.sampling.executor == "local":
                settings = params.arms[arm].sampling
                working["sampling"] = self._sample(
                    draws_of_arm(params, arm), settings.rollouts_per_batch, self._group_size(arm)
                )
        updates = memory.updates(arm)
        rows = updates.rows(training.tokens_per_microbatch)
        peak = updates.peak(rows, recompute=recompute)
        logits = memory.logits(rows * updates.steps)
        working |= {"activations": float(peak - logits), "logits": float(logits)}
        processes = ranks if params.machine.device == "cpu" else 1
        made = StageMemory(
            stage=f"train@{arm}",
            processes=processes,
            states={name: each for name, each in states.items() if each},
            working=working,
            other_activations=_other(updates, rows, recompute, logits),
        )
        room = self._room(processes, states)
        if room is None:
            return made
        largest = updates.largest_rows(room, recompute=recompute) * updates.tokens
        if peak > room:
            self._refuse(
                made,
                f"arms.{arm}.training.tokens_per_microbatch",
                training.tokens_per_microbatch,
                largest,
            )
        return replace(made, microbatch=largest)

    def _judges(self, purpose: Purpose) -> dict[str, float]:
        """Returns the bytes of the models of judges, of those whose weights are on this machine."""
        found = 0.0
        for each in self._params.judges(purpose).values():
            if isinstance(each.model, DirectoryBase) and find_judge(each.judge).needs_model:
                directory = self._data / each.model.path
                found += JUDGE_BYTES * sum(map(stored_numbers, directory.glob("*.safetensors")))
        return {"judges": found} if found else {}

    def _refuse(self, made: StageMemory, path: str, value: int, fitting: int) -> None:
        """Keeps what to change so that a stage fits, unless another one does not, either."""
        if self.misfit is not None:
            return
        params, limit = self._params, self._params.machine.memory_gb
        needed = (made.peak + self._libraries) * made.processes
        of = f" in {made.processes} processes" if made.processes > 1 else ""
        takes = f"{made.stage} takes {format_size(needed)}{of}"
        ways = ["raise machine.memory_gb"]
        if made.other_activations is not None and not params.policy.recompute:
            ways.insert(0, "set policy.recompute true")
        if fitting:
            self.misfit = (
                f"{PARAMS}: {path} must be at most {fitting} with machine.memory_gb {limit:g}, got "
                f"{value}: {takes}; lower it, or {' or '.join(ways)}"
            )
            return
        if params.machine.dtype == "float32":
            ways.append("set machine.dtype bfloat16")
        self.misfit = (
            f"{PARAMS}: machine.memory_gb must be more than {limit:g} for policy.base, of which "
            f"not one rollout of the largest length fits: {takes}; {' or '.join(ways)}, or take a "
            "smaller base"
        )


def _other(updates: UpdateMemory, rows: int, recompute: bool, logits: float) -> float | None:
    """Returns the activations with the other value of policy.recompute; None: it has no blocks."""
    try:
        return updates.peak(rows, recompute=not recompute) - logits
    except ParameterError:
        return None


def _largest(fits: Callable[[int], bool], *, guess: int, most: int) -> int:
    """Returns the largest number below `most` that fits, near a guess; 0: not even one does."""
    count = min(max(guess, 1), most)
    while count > 0 and not fits(count):
        count -= max(1, count // 16)
    while 0 < count < most - 1 and fits(count + 1):
        count += 1
    return count


def require_memory(params: Parameters, *, show: Callable[[str], None]) -> None:
    """Shows the memory of the stages, or what is missing on this machine to compute it.

    Raises:
      ArtifactError: If a file of prompts is wrong.
      ParameterError: If a stage needs more than machine.memory_gb, or the task or the policy is
        wrong.
    """
    try:
        found = measure_stages(params)
    except (AbsentError, MissingExtraError, StorageError) as error:
        show(f"memory is not computed: {str(error).removeprefix(f'{PARAMS}: ')}")
        return
    if found is None:
        show(f"memory is not computed for policy.kind {params.policy.kind}")
        return
    show(memory_table(found, params))
    if found.misfit is not None:
        raise ParameterError(found.misfit)


def memory_table(found: RunMemory, params: Parameters) -> str:
    """Returns the memory of stages as a table of at most COLUMNS columns, a stage per column.

    Stages that need the same share a column.
    """
    other = OTHER[params.policy.recompute]
    columns: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for each in found.stages:
        sizes = {**each.states, **each.working}
        if each.other_activations is not None:
            sizes[other] = each.other_activations
        cells = {name: format_size(size) for name, size in sizes.items() if size}
        cells["in all"] = format_size(each.peak)
        if each.microbatch is not None:
            cells["largest microbatch"] = str(each.microbatch)
        columns.setdefault(tuple(cells.items()), []).append(each.stage)
    shown = {name for cells in columns for name, _ in cells}
    names = [name for name in CONTENTS if name in shown]
    titles = ["", *names]
    made = [[_join(of), *(dict(cells).get(n, "-") for n in names)] for cells, of in columns.items()]
    widths = [max(map(len, titles)), *(max(map(len, column)) for column in made)]
    lines, start = list[str](), 0
    while start < len(made):
        end = start + 1
        while end < len(made) and _width([widths[0], *widths[1 + start : 2 + end]]) <= COLUMNS:
            end += 1
        parts = [titles, *made[start:end]]
        spans = [widths[0], *widths[1 + start : 1 + end]]
        for row in zip(*parts):
            first, *rest = (cell.rjust(span) for cell, span in zip(row, spans))
            lines.append("  ".join([row[0].ljust(len(first)), *rest]).rstrip())
        start = end
    head = "memory of a process by stage, without weights read"
    if found.libraries:
        head += f"; Python and its libraries add {format_size(found.libraries)}"
    return "\n".join([head, *lines])


def _width(spans: Sequence[int]) -> int:
    return sum(spans) + 2 * (len(spans) - 1)


def _join(stages: Sequence[str]) -> str:
    """Returns the name of stages that need the same, such as train@plain,sgpo."""
    first, *others = stages
    joined = ",".join([first, *(each.partition("@")[2] or each for each in others)])
    if len(joined) <= LONGEST_NAME or not others:
        return joined
    return f"{first} and {len(others)} more"


def format_size(size: float) -> str:
    """Returns e.g. `1.9 GB` or `41 MB`, with two significant digits."""
    unit, name = (GB, "GB") if size >= 0.995 * GB else (MB, "MB")
    number = size / unit
    return f"{float(f'{number:.2g}'):g} {name}"
