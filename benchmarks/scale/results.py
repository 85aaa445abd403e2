"""Computes memory, seconds, traffic, storage and price of runs."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.scale.inputs import (
    COMPUTED_BYTES,
    Assumed,
    Model,
    Run,
    assume,
    make_model,
    make_run,
)
from benchmarks.scale.work import Dealt, Engine, deal, sampling_seconds, trained_rollouts
from grpo.modalities.shared.logits import peak_logits_bytes
from grpo.modalities.shared.states import PRECISE_BYTES, gathered_bytes, state_bytes
from grpo.runtime.artifacts.files import SYNCED_AT_ONCE

ENDS = ("best", "worst")
WEIGHT = COMPUTED_BYTES  # per parameter: passes are in bfloat16
REDUCED_BYTES = PRECISE_BYTES  # per gradient element in the reduction over ranks
STORED = WEIGHT + 3 * PRECISE_BYTES  # in a policy's directory: weights, copies and two moments
DVC_HASHES_AT_ONCE = 4  # files of a directory, on a host with eight processors or more
STAGES = 4  # per round: rollout, score, train, evaluate
SAMPLING_STAGES = 3  # stages that start vLLM: all but score
WIDER_ENGINE = 4  # GPUs per engine with tensor parallelism
BUSY = ("sampling", "scoring", "updates", "evaluation")  # parts in which GPUs compute
ONLINE = ("sampling", "scoring", "updates", "weights", "records")  # parts of an iteration
LARGER = 4  # factor of iterations per round
Numbers = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run at one end of the assumptions."""

    run: Run
    model: Model
    scored: Dealt  # log-prob passes of an iteration
    updates: list[Dealt]  # training passes of an iteration, by update
    measured: dict[str, Any]
    assumed: Assumed

    @property
    def waves(self) -> float:
        """Microbatches per rank and update."""
        return sum(each.waves for each in self.updates) / len(self.updates)

    @property
    def stored_bytes(self) -> int:
        """Bytes of a policy's directory."""
        return STORED * self.model.parameters

    def engine(self, gpus: int = 1) -> Engine:
        """Returns a sampling engine on a number of GPUs."""
        return Engine(model=self.model, gpus=gpus, assumed=self.assumed)

    def file_seconds(self, size: float) -> float:
        """Returns the seconds of reading or writing files on a host."""
        return size / self.assumed.files_gb_per_second / 1e9

    def gather_seconds(self, size: float) -> float:
        """Returns the seconds of an all-gather or reduce-scatter of `size` bytes.

        Traffic within a host uses NVLink; all GPUs of a host share its network.
        """
        assumed, share = self.assumed, 1e9 * self.assumed.link_share
        hosts = self.run.gpus / assumed.gpus_per_host
        within = size * (1 - 1 / self.run.gpus) / (assumed.nvlink_gb_per_second * share)
        network = assumed.gpus_per_host * assumed.network_gb_per_second * share
        return max(within, size * (1 - 1 / hosts) / network)


def work_out(
    inputs: dict[str, Any], measured: dict[str, Any], savings: dict[str, Any]
) -> dict[str, Any]:
    """Returns the estimates of every run at both ends of the assumptions.

    Raises:
      ValueError: If a run exceeds the memory of its GPUs.
    """
    found = {}
    for name, spec in inputs["runs"].items():
        run, model = make_run(spec), make_model(spec, measured["blocks"][name])
        trained = trained_rollouts(run, savings["trained_share"])
        (scored,) = deal(model.flops, trained, run, parts=1, is_training=False)
        updates = deal(model.flops, trained, run, parts=run.updates_per_iteration, is_training=True)
        best, worst = (
            Case(
                run=run,
                model=model,
                scored=scored,
                updates=updates,
                measured=measured,
                assumed=assume(inputs, end),
            )
            for end in ENDS
        )
        found[name] = {
            "parameters": model.parameters,
            "training_bytes": training_bytes(run, model),
            "limits": limits(worst),
            "traffic_bytes": traffic_bytes(worst),
            "waves": worst.waves,
            "best": _take(best, savings["arms"]),
            "worst": _take(worst, savings["arms"]),
        }
    return found


def _take(case: Case, arms: dict[str, Any]) -> dict[str, Any]:
    """Returns the estimates that depend on the end of the assumptions."""
    seconds = seconds_of_round(case)
    alone = replace(case, run=replace(case.run, iterations_per_round=1))
    return {
        "seconds": seconds,
        "seconds_of_one_iteration": seconds_of_round(alone),
        "update": seconds_of_update(case),
        "s3_seconds": case.stored_bytes / case.assumed.s3_gb_per_second / 1e9,
        "arms": price_arms(case, seconds, arms),
        "ways": work_out_ways(case, seconds),
    }


def training_bytes(run: Run, model: Model) -> Numbers:
    """Returns the memory of a GPU at the start of a backward pass, by content."""
    block, root = model.block_parameters, model.root_parameters
    return {
        **state_bytes(model.parameters, itemsize=WEIGHT, ranks=run.gpus),
        **gathered_bytes(block, root, itemsize=WEIGHT),
        "activations": model.activation_bytes * model.blocks * run.microbatch,
        "logits": peak_logits_bytes(run.microbatch, model.flops.vocabulary, WEIGHT),
    }


def limits(case: Case) -> Numbers:
    """Returns limits by memory: the widest row that fits, rollouts at once, and related numbers.

    Raises:
      ValueError: If the run's microbatches do not fit.
    """
    run, model, assumed = case.run, case.model, case.assumed
    found = training_bytes(run, model)
    fixed = sum(found.values()) - found["activations"]
    room = assumed.gpu_memory_gb * 1e9 * (1 - assumed.free_share) - fixed
    widest = room // (model.activation_bytes * model.blocks)
    if widest < run.microbatch:
        raise ValueError(
            f"a microbatch must have at most {widest:.0f} tokens on {run.gpus} GPUs, has "
            f"{run.microbatch}; lower tokens_per_microbatch or max_steps"
        )
    recomputed = model.activation_bytes + COMPUTED_BYTES * model.hidden_size * model.blocks
    engine, tokens = case.engine(), run.prompt_tokens + run.mean_steps
    return {
        "widest_row": widest,
        "widest_row_recomputed": room // recomputed,
        "all_logits_bytes": 4 * run.microbatch * model.flops.vocabulary,
        "sampled_weight_bytes": engine.weight_bytes,
        "cache_room_bytes": engine.cache_room,
        "rollouts_at_once": engine.at_once(tokens),
        "rollouts_of_engine": run.rollouts // run.gpus,
        "rollouts_at_once_of_four": case.engine(WIDER_ENGINE).at_once(tokens),
        "float32_factor": assumed.gpu_tflops / assumed.gpu_float32_tflops,
    }


def seconds_of_round(case: Case) -> Numbers:
    """Returns the seconds of a round, by part."""
    run, model, measured = case.run, case.model, case.measured
    stage = measured["stage_cpu_seconds"] + measured["files"]["dvc_repro"]
    sampler = case.assumed.engine_start_seconds + case.file_seconds(WEIGHT * model.parameters)
    sampled = seconds_of_sampling(case, gpus=1)
    update = seconds_of_update(case)
    gathers = case.scored.waves * case.gather_seconds(COMPUTED_BYTES * model.parameters)
    scoring = max(case.scored.slowest_flops / case.assumed.flops_per_second, gathers)
    count, later = run.iterations_per_round, run.iterations_per_round - 1
    # The first iteration's rollouts are sampled by a stage of their own, whose engine is fresh.
    records = measured["rollouts"]["seconds_per_step"] * run.rollouts * run.mean_steps
    return {
        # The engines of train@ start if there is a second iteration.
        "starts": STAGES * stage + (SAMPLING_STAGES - (later == 0)) * sampler,
        "sampling": count * sampled["sampling"],
        "scoring": count * scoring,
        "updates": count * run.updates_per_iteration * max(update.values()),
        "weights": seconds_of_first_offer(case) * (later > 0)
        + later * sum(seconds_of_weights(case).values()),
        "records": count * records,
        "evaluation": sampled["evaluation"],
        **seconds_of_files(case),
    }


def seconds_of_first_offer(case: Case) -> float:
    """Returns the seconds more that the first offer of weights in a stage takes than later ones.

    It takes fresh memory, in which the later ones replace what they find.
    """
    rates = case.measured["weights"]
    gigabytes = WEIGHT * case.model.parameters / 1e9
    seconds: float = (rates["first"] - rates["offer"]) * gigabytes
    return seconds


def seconds_of_weights(case: Case) -> Numbers:
    """Returns the seconds in which samplers get the weights of an update, by part.

    All ranks gather the weights. The first of each host copies them from its GPU to a file in
    memory, and the samplers of the host load that file at the same time.
    """
    size, rates = WEIGHT * case.model.parameters, case.measured["weights"]
    to_host = size / case.assumed.host_gb_per_second / 1e9
    return {
        "gather": case.gather_seconds(size) + to_host,
        "offer": rates["offer"] * size / 1e9,
        "load": rates["load"] * size / 1e9,
        "wake": case.assumed.engine_wake_seconds,
    }


def seconds_of_sampling(case: Case, *, gpus: int) -> Numbers:
    """Returns the seconds of sampling and judging, of an iteration and of an evaluation.

    Args:
      gpus: Number of GPUs per sampling engine.
    """
    run, engine = case.run, case.engine(gpus)
    judge = case.measured["judge_cpu_seconds"] / run.gpus
    drawn = {
        "sampling": (run.prompts_per_iteration, run.rollouts_per_group),
        "evaluation": (run.eval_prompts, run.eval_rollouts),
    }
    return {
        part: sampling_seconds(engine, run, prompts=prompts, group=group) + prompts * group * judge
        for part, (prompts, group) in drawn.items()
    }


def seconds_of_update(case: Case) -> Numbers:
    """Returns the seconds of an update's passes and of its traffic, which overlap."""
    flops = sum(each.slowest_flops for each in case.updates) / len(case.updates)
    per_wave = (2 * COMPUTED_BYTES + REDUCED_BYTES) * case.model.parameters
    return {
        "passes": flops / case.assumed.flops_per_second,
        "traffic": case.waves * case.gather_seconds(per_wave),
    }


def seconds_of_files(case: Case) -> Numbers:
    """Returns the seconds of reading, writing and hashing the policy's directory per round.

    Its files have at most 4 GB, so that several are hashed at the same time. The host that writes
    them takes their fingerprint from its memory.
    """
    run, policy = case.run, case.stored_bytes
    store = policy / case.assumed.host_gb_per_second / 1e9 + case.file_seconds(policy)
    hashing = case.measured["files"]
    fingerprint = hashing["sha256"] * policy / 1e9 / SYNCED_AT_ONCE
    if run.gpus > case.assumed.gpus_per_host:  # other hosts read what the first has written
        fingerprint = max(fingerprint, case.file_seconds(policy))
    return {
        "fingerprints": fingerprint,
        "load and store": case.file_seconds(policy) + store,
        "checkpoints": ((run.iterations_per_round - 1) // run.iterations_per_checkpoint) * store,
        "hash": max(hashing["md5"] * policy / 1e9 / DVC_HASHES_AT_ONCE, case.file_seconds(policy)),
        "copy": 2 * case.file_seconds(policy),
    }


def traffic_bytes(case: Case) -> Numbers:
    """Returns bytes of traffic per GPU and update, and of all GPUs per round."""
    run, parameters, stored = case.run, case.model.parameters, case.measured["rollouts"]
    reward = stored["reward_bytes_per_rollout"]
    received = parameters * (1 - 1 / run.gpus)
    hosts = run.gpus / case.assumed.gpus_per_host
    return {
        "all-gathers": case.waves * 2 * COMPUTED_BYTES * received,
        "reduce-scatters": case.waves * REDUCED_BYTES * received,
        "policy to ranks": hosts * case.stored_bytes,
        "weights to samplers": (SAMPLING_STAGES + run.iterations_per_round - 1)
        * hosts
        * WEIGHT
        * parameters,
        "rollouts": run.iterations_per_round
        * run.rollouts
        * (run.mean_steps * stored["bytes_per_step"] + reward),
        "policy": case.stored_bytes,
        "policies of all rounds": run.rounds * case.stored_bytes,
    }


def price_arms(case: Case, seconds: Numbers, arms: dict[str, Any]) -> dict[str, Numbers]:
    """Returns hours and price of a run by arm, including a profile of one rollout per prompt.

    The rounds of an arm are scaled by its fraction of sampled steps, and the updates by its
    fraction of trained steps.

    Args:
      seconds: Seconds of a round of uniform GRPO, by part.
    """
    run, assumed = case.run, case.assumed
    prompts = run.rounds * run.iterations_per_round * run.prompts_per_iteration
    profile = sampling_seconds(case.engine(), run, prompts=prompts, group=1)
    whole = {"value": 1.0}
    uniform = {"sampled_steps": whole, "trained_steps": whole}
    prices = {}
    for name, shares in {"uniform": uniform, **arms}.items():
        sampled, trained = (shares[f"{kind}_steps"]["value"] for kind in ("sampled", "trained"))
        learning = seconds["scoring"] + seconds["updates"]
        own = sum(seconds.values()) - (1 - trained / sampled) * learning
        rounds = round(run.rounds * sampled)
        once = assumed.engine_start_seconds + assumed.engine_compile_seconds
        hours = (rounds * own + profile + once) / 3600
        prices[name] = {
            "rounds": rounds,
            "hours": hours,
            "gpu_hours": run.gpus * hours,
            "usd": run.gpus * hours * assumed.usd_per_gpu_hour,
        }
    return prices


def work_out_ways(case: Case, seconds: Numbers) -> dict[str, Numbers]:
    """Returns hours of all rounds and the share of it in which GPUs compute, by added change."""
    wider = seconds_of_sampling(case, gpus=WIDER_ENGINE)
    wider["sampling"] *= case.run.iterations_per_round
    changes: dict[str, tuple[Numbers, int]] = {
        "as it is": ({}, 1),
        "linked": ({"copy": 0.0}, 1),
        "larger": ({}, LARGER),
        "wider engines": (wider, LARGER),
    }
    own, found = dict(seconds), {}
    for name, (changed, larger) in changes.items():
        own |= changed
        online = sum(own.get(part, 0.0) for part in ONLINE)
        of_round = sum(own.values()) + (larger - 1) * online
        busy = sum(own.get(part, 0.0) for part in BUSY)
        busy += (larger - 1) * sum(own.get(part, 0.0) for part in BUSY if part in ONLINE)
        hours = case.run.rounds / larger * of_round / 3600
        found[name] = {"hours": hours, "share": busy / of_round}
    return found
