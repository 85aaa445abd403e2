"""A modality of the tests: a rollout pulls one of ten arms, and its text is the arm's digit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from grpo.modalities.modality import Modality, PolicyParams, RunParams, TokenDraws, TokenSampling
from grpo.modalities.policy import Policy
from grpo.modalities.shared.directories import PolicyState, read_round, write_state
from grpo.modalities.shared.logits import entropy_of
from grpo.modalities.shared.packed import Layout, Rows
from grpo.modalities.shared.warmup import BasePolicy
from grpo.runtime.artifacts.tensors import read_tensors, write_tensors
from grpo.runtime.seeds import derive_seed
from grpo.schema import Positive, Strict
from grpo.types import Cost, StepLogProbs

WEIGHTS = "model.safetensors"
FEATURES = 256  # counts of a prompt's bytes
LAYOUT: Layout = {
    "features": Rows("prompt"),
    "steps": Rows("rollout", each="integer"),
    "pulled": Rows("rollout", "steps", each="integer"),
    "behavior_logp": Rows("rollout", "steps", each="real"),
}


class FreshBandit(Strict):
    arms: Positive
    spread: float  # deviation of the first weights


class BanditParams(PolicyParams):
    kind: Literal["bandit"]
    base: FreshBandit


@dataclass(frozen=True, kw_only=True)
class Pulls:
    group: Int[Tensor, " rollout"]  # row of `features`
    features: Float[Tensor, "prompt feature"]
    pulled: Int[Tensor, " rollout"]

    noise = variant = chunks = None

    @property
    def mask(self) -> Bool[Tensor, "rollout step"]:
        return torch.ones(len(self.pulled), 1, dtype=torch.bool)

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "Pulls":
        return Pulls(group=self.group[rows], features=self.features, pulled=self.pulled[rows])

    def pack(self, logp: Float[Tensor, "rollout step"]) -> dict[str, Tensor]:
        return {
            "features": self.features,
            "steps": torch.ones(len(self.pulled), dtype=torch.long),
            "pulled": self.pulled,
            "behavior_logp": logp[:, 0],
        }


class BanditPolicy(Policy[Pulls]):
    def __init__(self, model: nn.Linear, temperature: float) -> None:
        self._model, self.decoding, self.cost = model, temperature, Cost()

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def layout(self) -> Layout:
        return LAYOUT

    def sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[Pulls, Float[Tensor, "rollout step"]]:
        features = torch.zeros(len(prompts), FEATURES)
        for row, prompt in enumerate(prompts):
            for byte in prompt.encode():
                features[row, byte] += 1
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(group_sizes))
        with torch.no_grad():
            chances = self._logits(features).softmax(dim=-1)[group]
            pulled = chances.multinomial(1, generator=generator)[:, 0]
            pulls = Pulls(group=group, features=features, pulled=pulled)
            self.cost += Cost(sampled_steps=len(pulled))
            return pulls, self.step_log_probs(pulls).logp

    def step_log_probs(
        self,
        trajectory: Pulls,
        needed: Bool[Tensor, "rollout step"] | None = None,
        *,
        with_entropy: bool = False,
    ) -> StepLogProbs:
        every = self._logits(trajectory.features).log_softmax(dim=-1)[trajectory.group]
        self.cost += Cost(flops=2 * self._model.weight.numel() * len(trajectory.pulled))
        return StepLogProbs(
            logp=every.gather(1, trajectory.pulled[:, None]),
            entropy=entropy_of(every)[:, None] if with_entropy else None,
        )

    def decode(self, trajectory: Pulls) -> list[str]:
        return [f"#{arm}" for arm in trajectory.pulled.tolist()]

    def is_finished(self, trajectory: Pulls) -> Bool[Tensor, " rollout"]:
        return torch.ones(len(trajectory.pulled), dtype=torch.bool)

    def widths(
        self,
        trajectory: Pulls,
        rows: Int[Tensor, " kept"],
        needed: Bool[Tensor, "kept step"],
    ) -> Int[Tensor, " kept"]:
        return torch.ones(len(rows), dtype=torch.long)

    def restore(
        self, tensors: dict[str, Tensor], row: Int[Tensor, " rollout"]
    ) -> tuple[Pulls, Float[Tensor, "rollout step"]]:
        pulls = Pulls(group=row, features=tensors["features"], pulled=tensors["pulled"])
        return pulls, tensors["behavior_logp"][:, None]

    def _logits(self, features: Tensor) -> Tensor:
        return self._model(features) / self.decoding


class Bandit(Modality[BanditParams, TokenSampling, TokenDraws]):
    kind = "bandit"
    policy = BanditParams
    sampling = TokenSampling
    evaluation_sampling = TokenDraws
    prompt_kind = "text"
    output_kind = "text"
    step_name = "pull"
    has_greedy = False

    def rule_facts(self, policy: BanditParams, sampling: TokenSampling) -> dict[str, Any]:
        return {"top_p": sampling.top_p}

    def make_base(self, params: RunParams[BanditParams], data: Path) -> BasePolicy:
        torch.manual_seed(derive_seed(params.seed, "base"))
        base = params.policy.base
        weight = base.spread * torch.randn(base.arms, FEATURES)

        def save(directory: Path) -> None:
            write_tensors(directory / WEIGHTS, {"weight": weight})
            write_state(directory, PolicyState(name="base"))

        return BasePolicy(num_updates=0, warm_up=lambda table: iter(()), save=save)

    def step_limit(self, policy: BanditParams, sampling: TokenSampling) -> int:
        return 1

    def round_draws(
        self, policy: BanditParams, sampling: TokenSampling, *, iterations_behind: int
    ) -> float:
        return sampling.temperature

    def evaluation_draws(self, policy: BanditParams, sampling: TokenDraws) -> dict[str, float]:
        return {"sampled": sampling.temperature}

    def load_policy(
        self,
        params: RunParams[BanditParams],
        *,
        base: Path,
        directory: Path,
        draws: float,
        policies_per_host: int = 1,
    ) -> BanditPolicy:
        model = nn.Linear(FEATURES, params.policy.base.arms, bias=False)
        model.load_state_dict(read_tensors(base / WEIGHTS))
        read_round(directory, base, model)
        return BanditPolicy(model, draws)

    def layout(self, policy: BanditParams, base: Path) -> Layout:
        return LAYOUT
