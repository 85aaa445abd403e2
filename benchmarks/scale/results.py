"""Computes memory, seconds, traffic, storage and price of runs."""

from dataclasses import dataclass
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
from grpo.modalities.shared.logits import CHUNK_LOGITS, KEPT_LOGITS, num_recomputed

ENDS = ("best", "worst")
# Bytes per parameter: bfloat16 weights for passes, and float32 copy, gradient and two moments.
WEIGHT, COPY, GRADIENT, MOMENTS = COMPUTED_BYTES, 4, 4, 8
REDUCED_BYTES = 4  # per gradient element in the reduction over ranks
GATHERED_BLOCKS = 2  # the current block and the prefetched one
STORED = WEIGHT + COPY + MOMENTS  # in a policy's directory
LARGER_FILE = (COPY + MOMENTS) / STORED  # fraction of the optimizer file, hashed by one thread
STAGES = 4  # per round: rollout, score, train, evaluate
SAMPLING_STAGES = 2  # stages that start vLLM
WIDER_ENGINE = 4  # GPUs per engine with tensor parallelism
BUSY = ("sampling", "scoring", "updates", "evaluation")  # parts in which GPUs compute
GROWING = ("sampling", "scoring", "updates")  # parts proportional to rollouts per round
LARGER = 4  # factor of rollouts and updates per round
Numbers = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run at one end of the assumptions."""

    run: Run
    model: Model
    scored: Dealt  # log-prob passes of a round
    updates: list[Dealt]  # training passes of a round, by update
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
        updates = deal(model.flops, trained, run, parts=run.updates_per_round, is_training=True)
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
    return {
        "seconds": seconds,
        "update": seconds_of_update(case),
        "s3_seconds": case.stored_bytes / case.assumed.s3_gb_per_second / 1e9,
        "arms": price_arms(case, seconds, arms),
        "hours": hours_by_way(case, seconds),
    }


def training_bytes(run: Run, model: Model) -> Numbers:
    """Returns the memory of a GPU at the start of a backward pass, by content."""
    shard = model.parameters / run.gpus
    block, root = model.block_parameters, model.root_parameters
    logits = run.microbatch * model.flops.vocabulary
    is_kept = num_recomputed(run.microbatch, model.flops.vocabulary) == 0
    # Of a recomputed chunk: logits, and their gradient in the dtype of the head.
    return {
        "weights": WEIGHT * shard,
        "copies": COPY * shard,
        "gradients": GRADIENT * shard,
        "moments": MOMENTS * shard,
        "gathered blocks": GATHERED_BLOCKS * COMPUTED_BYTES * block,
        "a block's gradient": (COMPUTED_BYTES + REDUCED_BYTES) * block,
        "embeddings and head, with gradients": 2 * COMPUTED_BYTES * root,
        "activations": model.activation_bytes * model.blocks * run.microbatch,
        "logits": 4 * min(logits, KEPT_LOGITS) if is_kept else (4 + COMPUTED_BYTES) * CHUNK_LOGITS,
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
    model, measured = case.model, case.measured
    stage = measured["stage_cpu_seconds"] + measured["files"]["dvc_repro"]
    sampler = case.assumed.engine_start_seconds + case.file_seconds(WEIGHT * model.parameters)
    update = seconds_of_update(case)
    gathers = case.scored.waves * case.gather_seconds(COMPUTED_BYTES * model.parameters)
    return {
        "starts": STAGES * stage + SAMPLING_STAGES * sampler,
        **seconds_of_sampling(case, gpus=1),
        "scoring": max(case.scored.slowest_flops / case.assumed.flops_per_second, gathers),
        "updates": case.run.updates_per_round * max(update.values()),
        **seconds_of_files(case),
    }


def seconds_of_sampling(case: Case, *, gpus: int) -> Numbers:
    """Returns the seconds of sampling and judging, of a round and of an evaluation.

    Args:
      gpus: Number of GPUs per sampling engine.
    """
    run, engine = case.run, case.engine(gpus)
    judge = case.measured["judge_cpu_seconds"] / run.gpus
    drawn = {
        "sampling": (run.prompts_per_round, run.rollouts_per_group),
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
    """Returns the seconds of reading, writing and hashing the policy's directory per round."""
    policy, rates = case.stored_bytes, case.measured["files"]
    from_gpu = policy / case.assumed.host_gb_per_second / 1e9
    return {
        # Counted in the first stage that reads it; the base is hashed in the first round.
        "fingerprints": max(rates["sha256"] * policy / 1e9, case.file_seconds(policy)),
        "load and store": from_gpu + 2 * case.file_seconds(policy),
        "hash": max(rates["md5"] * LARGER_FILE * policy / 1e9, case.file_seconds(policy)),
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
        "weights to samplers": SAMPLING_STAGES * hosts * WEIGHT * parameters,
        "rollouts": run.rollouts * (run.mean_steps * stored["bytes_per_step"] + reward),
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
    prompts = run.rounds * run.prompts_per_round
    profile = sampling_seconds(case.engine(), run, prompts=prompts, group=1)
    whole = {"value": 1.0}
    uniform = {"sampled_steps": whole, "trained_steps": whole}
    prices = {}
    for name, shares in {"uniform": uniform, **arms}.items():
        sampled, trained = (shares[f"{kind}_steps"]["value"] for kind in ("sampled", "trained"))
        learning = seconds["scoring"] + seconds["updates"]
        own = sum(seconds.values()) - (1 - trained / sampled) * learning
        rounds = round(run.rounds * sampled)
        hours = (rounds * own + profile + assumed.engine_start_seconds) / 3600
        prices[name] = {
            "rounds": rounds,
            "hours": hours,
            "gpu_hours": run.gpus * hours,
            "usd": run.gpus * hours * assumed.usd_per_gpu_hour,
        }
    return prices


def hours_by_way(case: Case, seconds: Numbers) -> Numbers:
    """Returns the hours of all rounds, first without changes, then after each added change."""
    changes: dict[str, tuple[Numbers, int]] = {
        "as it is": ({}, 1),
        "linked": ({"copy": 0.0}, 1),
        "larger": ({}, LARGER),
        "wider engines": (seconds_of_sampling(case, gpus=WIDER_ENGINE), LARGER),
    }
    own, hours = dict(seconds), {}
    for name, (changed, larger) in changes.items():
        own |= changed
        growing = sum(own[part] for part in GROWING)
        of_round = sum(own.values()) + (larger - 1) * growing
        hours[name] = case.run.rounds / larger * of_round / 3600
    return hours
