"""Policies whose step is a token: causal language models of `transformers`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.errors import ParameterError, brief, refused_by_library
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.directories import load_base
from grpo.modalities.shared.flops import Pass, TokenFlops, total_flops
from grpo.modalities.shared.packed import Layout, Rows
from grpo.modalities.shared.restoring import restore_round
from grpo.modalities.shared.text_policy import TextPolicy, pad_rows, unpack_texts
from grpo.modalities.shared.texts import draw_texts, end_tokens, num_positions
from grpo.modalities.tokens.forward import ForwardPasses, Scored
from grpo.modalities.tokens.modality import DEFAULT_VLLM, RoutingMode, TokenPolicyParams
from grpo.modalities.tokens.routing import (
    ROUTING_LAYOUT,
    Routing,
    blank_routing,
    join_passes,
    pack_routing,
    recorded,
    replayed,
    require_routers,
    require_routing,
    unpack_routing,
)
from grpo.runtime.chats import Message, read_chat
from grpo.runtime.machine import DTYPES
from grpo.runtime.ranks import num_ranks, shard
from grpo.schema import PARAMS
from grpo.types import Cost, StepLogProbs

LAYOUT = {
    "prompt_lengths": Rows("prompt", each="integer"),
    "prompt_tokens": Rows("prompt", "prompt_lengths", each="integer"),
    "steps": Rows("rollout", each="integer"),
    "tokens": Rows("rollout", "steps", each="integer"),
    "behavior_logp": Rows("rollout", "steps", each="real"),
}


@dataclass(frozen=True, kw_only=True)
class TokenTrajectory:
    """Prompts padded on the left, sampled tokens padded on the right.

    Two rollouts of prompt "ab"; the first ended after one token (2 is the end token)::

        TokenTrajectory(group=[0, 0], prompt=[[97, 98]], prompt_mask=[[True, True]],
                        tokens=[[2, 0], [99, 2]], mask=[[True, False], [True, True]])
    """

    group: Int[Tensor, " rollout"]  # row of `prompt`
    prompt: Int[Tensor, "prompt width"]
    prompt_mask: Bool[Tensor, "prompt width"]
    tokens: Int[Tensor, "rollout step"]
    mask: Bool[Tensor, "rollout step"]
    routing: Routing | None = None  # the experts to replay; None: live routing

    noise = None  # the steps are not Gaussian
    variant = None  # no prompt variants
    chunks = None  # the steps are not action chunks

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "TokenTrajectory":
        """Returns some rollouts, truncated to `num_steps` steps, without common padding."""
        group = self.group[rows]
        blank = int((~self.prompt_mask[group]).sum(dim=1).min())
        return TokenTrajectory(
            group=group,
            prompt=self.prompt[:, blank:],
            prompt_mask=self.prompt_mask[:, blank:],
            tokens=self.tokens[rows, :num_steps],
            mask=self.mask[rows, :num_steps],
            routing=None if self.routing is None else self.routing.select(rows),
        )

    def pack(self, logp: Float[Tensor, "rollout step"]) -> dict[str, Tensor]:
        """Returns flat ragged tensors that can be concatenated."""
        routing = self.routing
        return {
            **(pack_routing(routing, self.prompt_mask, self.mask) if routing else {}),
            "prompt_tokens": self.prompt[self.prompt_mask].int(),
            "prompt_lengths": self.prompt_mask.sum(dim=1),
            "tokens": self.tokens[self.mask].int(),
            "steps": self.mask.sum(dim=1),
            "behavior_logp": logp[self.mask],
        }


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Sampling settings. They define the density, so log-probs use the same values (rule U25)."""

    temperature: float  # 0: greedy
    max_steps: int
    routing: RoutingMode = "live"  # expert choices that scoring replays in a mixture of experts


class TokenPolicy(TextPolicy[TokenTrajectory]):
    """A causal LM with its tokenizer and sampling settings."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        decoding: Decoding,
        uses_chat_template: bool,
    ) -> None:
        require_routers(model, decoding.routing)
        if getattr(model.config, "output_router_logits", False):
            model.config.output_router_logits = False  # no objective has a load-balancing loss
        self._model = model
        self.tokenizer = tokenizer
        self.decoding = decoding
        self.uses_chat_template = uses_chat_template
        self.cost = Cost()
        self.flops = TokenFlops(model)
        self.forward = ForwardPasses(model)
        self.end_tokens = end_tokens(model, tokenizer)
        self._pass: Callable[[Callable[[], Scored]], Scored] = lambda compute: compute()

    def shard(self, device: str) -> None:
        """Shards the weights over the ranks; scoring is then a collective of all ranks."""
        self.flops.measure()
        self._pass = shard(self.model, device)

    @property
    def _is_replaying(self) -> bool:
        """Whether updates replay the expert choices of sampling."""
        mode: RoutingMode = self.decoding.routing
        return mode == "replay_sampled"

    @property
    def model(self) -> PreTrainedModel:
        """The causal LM, or its wrapper with adapters."""
        return self._model

    def encode(self, prompts: list[str]) -> tuple[Int[Tensor, "prompt width"], Tensor]:
        """Returns tokens padded on the left and their mask."""
        return pad_rows([self._encode_one(prompt) for prompt in prompts], left=True)

    @property
    def layout(self) -> Layout:
        """The layout of stored rollouts."""
        return token_layout(self.decoding.routing)

    def unpack(
        self, tensors: dict[str, Tensor], group: Int[Tensor, " rollout"]
    ) -> tuple[TokenTrajectory, Float[Tensor, "rollout step"]]:
        """Returns a stored trajectory and its behavior log-probs; see `Policy`."""
        if self._is_replaying:
            require_routing(tensors)
        return super().unpack(tensors, group)

    def restore(
        self, tensors: dict[str, Tensor], row: Int[Tensor, " rollout"]
    ) -> tuple[TokenTrajectory, Float[Tensor, "rollout step"]]:
        """Returns a stored trajectory and its behavior log-probs.

        Raises:
          ArtifactError: If tokens or routing do not fit the model.
        """
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        stored = unpack_texts(tensors, vocabulary, left=True)
        trajectory = TokenTrajectory(
            group=row,
            prompt=stored.prompt,
            prompt_mask=stored.prompt_mask,
            tokens=stored.tokens,
            mask=stored.mask,
        )
        if self._is_replaying:
            routing = unpack_routing(
                self.model, tensors, row, trajectory.prompt_mask, trajectory.mask
            )
            trajectory = replace(trajectory, routing=routing)
        return trajectory, stored.logp

    def sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[TokenTrajectory, Float[Tensor, "rollout step"]]:
        """Returns rollouts and log-probs in nats; records the routing if updates replay it."""
        if not self._is_replaying:
            with self.forward.sampling():
                return self._sample(prompts, group_sizes=group_sizes, generator=generator)
        _ = self.flops.forward  # measured here, so that its passes are not recorded
        with self.forward.sampling(), recorded(self.model) as passes:
            trajectory, logp = self._sample(prompts, group_sizes=group_sizes, generator=generator)
        routing = join_passes(passes, trajectory.group, trajectory.mask)
        return replace(trajectory, routing=routing), logp

    def replayed(self, trajectory: TokenTrajectory) -> TokenTrajectory:
        """Returns the trajectory for updates; for `replay_proximal`, with blank routing.

        The first scoring of a token, before the updates, records its routing.
        """
        if self.decoding.routing != "replay_proximal":
            return trajectory
        rollouts, num_steps = trajectory.tokens.shape
        width = trajectory.prompt.shape[1]
        return replace(
            trajectory, routing=blank_routing(self.model, rollouts, width, num_steps - 1)
        )

    @torch.no_grad()
    def _sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[TokenTrajectory, Float[Tensor, "rollout step"]]:
        """Returns rollouts and their log-probs in nats at the decoding temperature.

        The group shares one pass over its prompt.
        """
        prompt, prompt_mask = self.encode(prompts)
        self._require_positions(int(prompt_mask.sum(dim=1).max()))
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(group_sizes))
        steps = self.decoding.max_steps
        uniform = torch.rand(len(group), steps, dtype=torch.float64, generator=generator)

        cache = self.forward.make_cache(steps)
        logits = self.forward.prompt_logits(prompt, prompt_mask, cache)[group]
        passes = [_reading(*prompt.shape, seen=prompt.shape[1])]
        cache.reorder_cache(group)
        ahead = self.forward.attention_ahead(prompt_mask[group], steps)

        def advance(step: int, chosen: Tensor, going: Tensor | None) -> Tensor:
            nonlocal ahead
            if going is not None:
                cache.reorder_cache(going)
                ahead = ahead.select(going)
            passes.append(_reading(len(chosen), 1, seen=prompt.shape[1] + step + 1))
            return self.forward.next_logits(chosen[:, None], ahead.at(step), cache)

        drawn = draw_texts(
            logits,
            advance,
            uniform=uniform,
            end_tokens=self.end_tokens,
            temperature=self.decoding.temperature,
        )
        self._count(*passes)
        self.cost += Cost(sampled_steps=int(drawn.mask.sum()))
        trajectory = TokenTrajectory(
            group=group,
            prompt=prompt,
            prompt_mask=prompt_mask,
            tokens=drawn.tokens,
            mask=drawn.mask,
        )
        return trajectory, drawn.logp

    def step_log_probs(
        self,
        trajectory: TokenTrajectory,
        needed: Bool[Tensor, "rollout step"] | None = None,
        *,
        with_entropy: bool = False,
    ) -> StepLogProbs:
        """Returns log-probs in nats at the decoding temperature, 0 on padding.

        Args:
          needed: The steps to compute; the others are 0. None: all steps.

        Raises:
          ValueError: If decoding is greedy and so has no density, or if the routing to replay was
            not recorded.
        """
        self.require_density()
        mask = trajectory.mask
        with self._routing(trajectory):
            scores, passes = self._pass(
                lambda: self.forward.log_prob(
                    trajectory.prompt,
                    trajectory.prompt_mask,
                    trajectory.group,
                    trajectory.tokens,
                    mask,
                    needed=mask if needed is None else mask & needed,
                    temperature=self.decoding.temperature,
                    may_share=self.decoding.routing == "live",
                    with_entropy=with_entropy,
                )
            )
        self._count(*passes)
        return StepLogProbs(logp=scores.logp, entropy=scores.entropy)

    def _routing(self, trajectory: TokenTrajectory) -> AbstractContextManager[None]:
        """Returns the context manager that replays a trajectory's routing, if any."""
        mode = self.decoding.routing
        if mode == "live":
            return nullcontext()
        if trajectory.routing is None:
            raise ValueError(f"policy.routing {mode} needs a trajectory with recorded routing")
        width, num_read = trajectory.prompt.shape[1], trajectory.tokens.shape[1] - 1
        return replayed(self.model, trajectory.routing, width=width, num_read=num_read)

    def _require_positions(self, prompt_tokens: int) -> None:
        """Raises ParameterError if the longest rollout of a prompt exceeds the model's context."""
        limit, steps = num_positions(self.model.config), self.decoding.max_steps
        if limit is not None and prompt_tokens + steps > limit:
            raise ParameterError(
                f"{PARAMS}: policy.max_steps: a prompt of {prompt_tokens} tokens and {steps} "
                f"steps need {prompt_tokens + steps} positions, the model has {limit} "
                "(max_position_embeddings); lower max_steps or shorten the prompts"
            )

    def _encode_one(self, prompt: str) -> list[int]:
        if self.uses_chat_template:
            text = _render(self.tokenizer, read_chat(prompt))
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return list(self.tokenizer(prompt, add_special_tokens=True)["input_ids"])

    def _count(self, *passes: Pass) -> None:
        """Adds forward passes, and backward passes if gradients are enabled, to the cost."""
        training = self.flops.training if torch.is_grad_enabled() else None
        flops = total_flops(passes, forward=self.flops.forward, training=training)
        self.cost += Cost(flops=flops)


def token_layout(routing: RoutingMode) -> Layout:
    """Returns the layout of stored rollouts, with expert choices for `replay_sampled`."""
    return {**LAYOUT, **ROUTING_LAYOUT} if routing == "replay_sampled" else LAYOUT


def _reading(rows: int, new: int, *, seen: int) -> Pass:
    """Returns a sampling pass; it computes the logits of the last position only."""
    return Pass(rows=rows, query=new, context=seen, logits=1)


def load_token_policy(
    params: RunParams[TokenPolicyParams], *, base: Path, directory: Path, decoding: Decoding
) -> TokenPolicy:
    """Returns the policy of a directory on the machine's device, without dropout.

    With several ranks, the weights are sharded among them.

    Args:
      base: The base policy's directory. A different `directory` holds the trained weights.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.policy
    dtype = DTYPES[params.machine.dtype]
    model, tokenizer = load_base(base, dtype)
    if settings.prompt_format == "chat":
        require_chat_template(tokenizer)
    restore_round(params, model, base=base, directory=directory)
    if num_ranks() == 1:  # otherwise the model stays on the host until it is sharded
        nn.Module.to(model, params.machine.device)
    require_routers(model, settings.routing)
    policy = TokenPolicy(
        model,
        tokenizer,
        decoding=decoding,
        uses_chat_template=settings.prompt_format == "chat",
    )
    if params.machine.compile:
        policy.forward.compile("inductor")
    if num_ranks() > 1:
        policy.shard(params.machine.device)
    return policy


def require_chat_template(tokenizer: Any) -> None:
    """Raises ParameterError unless the tokenizer's chat template renders user messages."""
    for said in ("first probe", "second probe"):
        _render(tokenizer, [{"role": "user", "content": said}])


def _render(tokenizer: Any, messages: list[Message]) -> str:
    """Returns the text of a chat, with the start of the assistant's turn.

    Raises:
      ParameterError: If the chat template raises, or leaves out a message of system or user.
    """
    roles = ", ".join(each["role"] for each in messages)
    with refused_by_library(
        lambda why: ParameterError(
            f"{PARAMS}: policy.prompt_format chat needs a chat template that renders messages of "
            f"{roles}: {why}; set plain or correct the template"
        )
    ):
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    for each in messages:
        # Templates may strip white space, and shorten what the assistant has thought.
        if each["role"] != "assistant" and each["content"].strip() not in text:
            raise ParameterError(
                f"{PARAMS}: policy.prompt_format chat: the tokenizer's chat template must render "
                f"the {each['role']} message, got {brief(repr(text))}; correct it or set plain"
            )
    return text


def load_vllm_sampler(
    params: RunParams[TokenPolicyParams], *, base: Path, directory: Path, decoding: Decoding
) -> TokenPolicy:
    """Returns a policy that samples with vLLM, in a process of its own or behind a server.

    Raises:
      ArtifactError: If a file is missing or broken.
      MissingExtraError: If vLLM is not installed.
      ParameterError: If vLLM refuses the model or a setting.
      RetryableError: If the engine's process ends, or the server does not answer.
    """
    # Imported here: few runs sample with vLLM.
    from grpo.modalities.tokens.vllm import StartEngine, VllmPolicy, find_python, start_engine
    from grpo.modalities.tokens.vllm_server import start_served

    settings, machine = params.policy, params.machine
    if settings.server is None:
        find_python()  # before the model is loaded
    model, tokenizer = load_base(base, DTYPES[params.machine.dtype])
    if settings.prompt_format == "chat":
        require_chat_template(tokenizer)
    if settings.lora:
        restore_round(params, model, base=base, directory=directory)
    start: StartEngine
    if settings.server is None:
        start = partial(start_engine, settings.vllm or DEFAULT_VLLM, machine.dtype, machine.threads)
    else:
        has_tied_output = (
            model.get_output_embeddings().weight is model.get_input_embeddings().weight
        )
        start = partial(start_served, settings.server, machine.dtype, has_tied_output)
    return VllmPolicy(
        model,
        tokenizer,
        base=base,
        directory=directory,
        start=start,
        decoding=decoding,
        uses_chat_template=settings.prompt_format == "chat",
    )
