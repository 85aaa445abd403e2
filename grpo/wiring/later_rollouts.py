"""Rollouts and rewards of the iterations after the first, from samplers that stay loaded."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch

from grpo.allocation.selection import History
from grpo.allocation.signal import Price
from grpo.errors import located
from grpo.modalities.shared.directories import offer_weights
from grpo.params.manifests import require_described
from grpo.params.parameters import Parameters
from grpo.runtime.artifacts.files import Scratch, atomic_path, remove
from grpo.runtime.artifacts.tables import (
    REWARDS,
    REWARDS_FILE,
    ROLLOUTS_FOLDER,
    iteration_name,
    write_table,
)
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.executors.base import Executor, Local, Weights
from grpo.runtime.ranks import all_agree, all_reduce_max, all_texts, num_ranks, this_rank
from grpo.runtime.shared_tensors import SharedTensors
from grpo.sampling.round_rollouts import write_round
from grpo.sampling.scoring import Judges, judge_stored, require_judged
from grpo.schema import DATA
from grpo.wiring.executors import open_executor
from grpo.wiring.iterations import RoundInputs, Trainer
from grpo.wiring.prices import build_price
from grpo.wiring.rewards import build_judges
from grpo.wiring.rollouts import draw_iteration, read_candidates
from grpo.wiring.rounds import StartLater
from grpo.wiring.sampling_workers import SamplingSetup, make_sampling_work, sampling_work
from grpo.wiring.shaping import build_shaping
from grpo.wiring.training_costs import training_costs

Warn = Callable[[str | None], None]


@dataclass(kw_only=True)
class _Sampler:
    """The first rank's executor, and the thread in which it is asked."""

    executor: Executor
    setup: SamplingSetup
    candidates: pd.DataFrame  # the prompts of the round's phase
    price: Price | None  # of groups, if the selection reads costs
    thread: ThreadPoolExecutor  # workers end with the thread that started them


@dataclass(kw_only=True)
class _OnlineRollouts:
    """Makes the rollouts and rewards of an iteration, once also in interrupted runs."""

    trainer: Trainer
    scratch: Scratch
    usage: Usage
    warn: Warn  # receives a warning about rollouts that were not judged, or None
    shares_weights: bool  # whether the sampler has the weights of the policy that is trained
    sampler: _Sampler | None  # None on other ranks than the first
    _memory: SharedTensors | None = field(default=None, init=False)  # of the weights of workers
    _started: Future[None] | None = field(default=None, init=False)

    def start(self, index: int, history: History, weights: int) -> Callable[[], None]:
        """Starts to sample and judge an iteration; see `StartLater`."""
        place = self.scratch.directory / iteration_name(index)
        is_made = self.sampler is not None and (place / REWARDS_FILE).exists()
        if all_reduce_max([float(is_made)]) == [1.0]:
            return lambda: None
        if weights and not self.shares_weights:
            with self.usage.part("weights"):
                self._send_weights(weights)
        if self.sampler is None:
            return self._wait
        if self.trainer.training.staleness and not isinstance(self.sampler.executor, Local):
            beside = self.usage.beside()  # the seconds are those of the updates at the same time
            self._started = self.sampler.thread.submit(self._make, index, history, place, beside)
        else:
            self._make(index, history, place, self.usage)
            self.sampler.executor.sleep()  # the update needs the memory
        return self._wait

    def _wait(self) -> None:
        if self._started is not None:
            with self.usage.part("waiting"):
                self._started.result()
        self._started = None
        all_agree(True)  # the other ranks read what the first one has stored

    def _send_weights(self, version: int) -> None:
        """Gives samplers the policy's present weights; all ranks must call it."""
        # All rollouts by the weights that are still there are sampled.
        self._memory = offer_weights(self.trainer.policy.model, self._memory)
        torch.cuda.empty_cache()  # samplers may use the same GPUs; does nothing on a CPU
        own = f"{socket.gethostname()} {self._memory.path}" if self._memory else ""
        paths = dict(each.split(" ", 1) for each in all_texts(own) if each)
        if self.sampler is not None:
            assert self._memory is not None
            self.sampler.executor.load_weights(Weights(version, self._memory.path, paths))

    def _make(self, index: int, history: History, place: Path, usage: Usage) -> None:
        with usage.part("sampling"):
            self._draw(index, history, place)
        with usage.part("judging"):
            self._judge(place)

    def _draw(self, index: int, history: History, place: Path) -> None:
        if (place / ROLLOUTS_FOLDER).exists():
            return
        assert self.sampler is not None
        drawn = draw_iteration(
            self.sampler.setup,
            index,
            executor=self.sampler.executor,
            candidates=self.sampler.candidates,
            history=history,
            price=self.sampler.price,
            scratch=place / "batches",
            progress=lambda done, total: None,
        )
        self.warn(drawn.unjudged)
        has_selection = bool(self.trainer.params.find_arm(self.trainer.arm).selection)
        with atomic_path(place / ROLLOUTS_FOLDER) as temporary:
            write_round(temporary, drawn, has_selection=has_selection)
        remove(place / "batches")

    def _judge(self, place: Path) -> None:
        assert self.sampler is not None
        judged = judge_stored(
            self.sampler.executor,
            [place / ROLLOUTS_FOLDER],
            build_shaping(self.trainer.params),
            scratch=place / "judged",
        )
        with located(f"train@{self.trainer.name}"):
            self.warn(require_judged(judged.rewards))
        write_table(judged.rewards, place / REWARDS_FILE, REWARDS)
        remove(place / "judged")


def build_later_judges(params: Parameters, inputs: RoundInputs) -> Judges | None:
    """Returns the judges, if it is this process that judges later iterations.

    Call it before the trainer is loaded; see `build_reward`.

    Raises:
      ArtifactError: If the judge's files are not those that the stage check has seen.
      MissingExtraError, ParameterError: See `build_reward`.
    """
    if this_rank() != 0:
        return None
    require_described(inputs.judge, params, DATA, "judge")
    judges_here = params.sampling.executor == "local" and num_ranks() == 1
    return build_judges(params, DATA, "reward") if judges_here else None


@contextmanager
def open_later_rollouts(
    trainer: Trainer,
    inputs: RoundInputs,
    *,
    judges: Judges | None,
    scratch: Scratch,
    usage: Usage,
    warn: Warn,
) -> Iterator[StartLater]:
    """Yields a function that samples and judges later iterations; samplers end with the block.

    With the executor `local` and one rank, the policy that is trained also samples. With several
    ranks, its weights are divided, and a process beside them samples.

    Args:
      judges: Those of `build_later_judges`.

    Raises:
      ArtifactError: If prompts or curriculum are invalid.
      WorkerError: If no Ray cluster answers at RAY_ADDRESS.
      ParameterError: If the phase has too few prompts, or there are too few GPUs.
    """
    params, name = trainer.params, trainer.name
    if params.sampling.executor == "local" and num_ranks() > 1:
        beside = params.sampling.model_copy(update={"executor": "processes", "workers": 1})
        params = params.model_copy(update={"sampling": beside})
    setup = SamplingSetup(
        params=params,
        prompts=inputs.prompts,
        purpose="round",
        round=name,
        base=inputs.base,
        policy=inputs.start,
    )
    is_local = params.sampling.executor == "local"
    shares = is_local and params.modality.share_sampler(params, trainer.policy) is not None
    online = _OnlineRollouts(
        trainer=trainer,
        scratch=scratch,
        usage=usage,
        warn=warn,
        shares_weights=shares,
        sampler=None,
    )
    if this_rank() != 0:
        yield online.start
        return
    opened = (
        nullcontext(Local(sampling_work(setup, trainer.policy, judges)))
        if is_local
        else open_executor(make_sampling_work, setup)
    )
    candidates = read_candidates(params, name, curriculum=inputs.curriculum, prompts=inputs.prompts)
    price = build_price(
        params,
        trainer.arm,
        base=inputs.base,
        candidates=candidates,
        training=lambda: training_costs(params, trainer.arm),
        policy=trainer.policy,
    )
    with opened as executor, ThreadPoolExecutor(1) as thread:
        online.sampler = _Sampler(
            executor=executor, setup=setup, candidates=candidates, price=price, thread=thread
        )
        try:
            yield online.start
        except BaseException:
            executor.abandon()  # the thread may wait for rollouts that nobody will use
            raise
    if not params.arms[trainer.arm].training.staleness:
        usage.move("sampling", executor.seconds())
