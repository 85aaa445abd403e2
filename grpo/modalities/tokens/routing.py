"""Routing replay for mixture-of-experts models: records and replays the experts of each token.

Replay fixes only the discrete choice. The model still computes and normalizes the gate weights of
the chosen experts, so gradients reach the router.
[Ma et al., 2025, arXiv 2510.11370; Zheng et al., 2025, arXiv 2512.01374, section 4]
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.shared.packed import Rows
from grpo.modalities.shared.texts import fill_from_end
from grpo.modalities.tokens.modality import RoutingMode
from grpo.schema import PARAMS

PROMPT_EXPERTS = "prompt_experts"
EXPERTS = "experts"
ROUTING_LAYOUT = {
    PROMPT_EXPERTS: Rows("prompt", "prompt_lengths"),
    EXPERTS: Rows("rollout", "steps", left_out=1),  # the last token is not an input
}
CHOICES = (torch.topk, torch.Tensor.topk)
RECORDS: ContextVar[bool] = ContextVar("RECORDS", default=True)  # False: during recomputation


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The experts of every input token, as a view of some rollouts of a shared store.

    A rollout's last token is not an input and has no entry. A blank entry (the largest number of
    its dtype) means that nothing was recorded; the model then routes live. One rollout with a
    prompt of two tokens, three steps, one layer and two experts per token::

        Routing(prompt=[[[[0, 3]], [[1, 2]]]], steps=[[[[3, 0]], [[2, 1]]]], prompt_row=[0],
                step_row=[0], is_open=False)
    """

    prompt: Integer[Tensor, "stored_prompt width layer choice"]  # padded on the left
    steps: Integer[Tensor, "stored_rollout read layer choice"]  # padded on the right
    prompt_row: Int[Tensor, " rollout"]  # row of `prompt`
    step_row: Int[Tensor, " rollout"]  # row of `steps`
    is_open: bool  # the first scoring of a token fills its blank entries

    def select(self, rows: Int[Tensor, " kept"]) -> "Routing":
        """Returns a view of some rollouts; it shares the store, so later records are visible."""
        return replace(self, prompt_row=self.prompt_row[rows], step_row=self.step_row[rows])

    def read(self, width: int, num_read: int) -> Integer[Tensor, "rollout position layer choice"]:
        """Returns the last `width` positions of the prompts and the first `num_read` steps."""
        prompt = self.prompt[self.prompt_row, self.prompt.shape[1] - width :]
        return torch.cat([prompt, self.steps[self.step_row, :num_read]], dim=1)

    def fill(self, chosen: Integer[Tensor, "rollout position layer choice"], width: int) -> None:
        """Writes choices to blank entries; the first `width` positions belong to prompts."""
        start = self.prompt.shape[1] - width
        positions = torch.arange(start, self.prompt.shape[1])
        _fill(self.prompt, self.prompt_row, positions, chosen[:, :width])
        positions = torch.arange(chosen.shape[1] - width)
        _fill(self.steps, self.step_row, positions, chosen[:, width:])


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Returns the top-k routers of a `transformers` model in layer order."""
    return [each for each in model.modules() if type(each).__name__.endswith("TopKRouter")]


def require_routers(model: nn.Module, mode: RoutingMode) -> None:
    """Raises ParameterError if the mode replays routing and the model has no routers."""
    if mode != "live" and not find_routers(model):
        name = type(model).__name__
        raise ParameterError(
            f"{PARAMS}: policy.routing {mode} needs a model with top-k routers such as "
            f"Qwen3MoeForCausalLM, {name} has none; set it to live"
        )


def blank_routing(model: nn.Module, rollouts: int, width: int, num_read: int) -> Routing:
    """Returns an open routing with blank entries and a separate prompt row per rollout."""
    rows = torch.arange(rollouts)
    return Routing(
        prompt=_blank(model, rollouts, width),
        steps=_blank(model, rollouts, num_read),
        prompt_row=rows,
        step_row=rows,
        is_open=True,
    )


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list to which each forward pass appends its experts [token, layer, choice]."""
    passes: list[Tensor] = []
    with _routed(find_routers(model), None, passes):
        yield passes


@contextmanager
def replayed(model: nn.Module, routing: Routing, *, width: int, num_read: int) -> Iterator[None]:
    """Replays routing in one forward pass over `width` prompt and `num_read` step positions.

    Blank entries route live. They are filled if the routing is open and gradients are disabled.
    """
    given = routing.read(width, num_read)
    passes: list[Tensor] = []
    with _routed(find_routers(model), given.flatten(0, 1), passes):
        yield
    if routing.is_open and not torch.is_grad_enabled():
        (chosen,) = passes
        routing.fill(chosen.unflatten(0, given.shape[:2]), width)


def repeat_current_routing(module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context manager that reinstates the current routing without recording."""
    routers = find_routers(module)
    now = [vars(router).get("forward") for router in routers]

    @contextmanager
    def again() -> Iterator[None]:
        token = RECORDS.set(False)
        outer = _swap_forwards(routers, now)
        try:
            yield
        finally:
            _swap_forwards(routers, outer)
            RECORDS.reset(token)

    return again


def join_passes(
    passes: list[Tensor],
    group: Int[Tensor, " rollout"],
    mask: Bool[Tensor, "rollout step"],
) -> Routing:
    """Returns the routing of a sampled batch from its passes.

    Args:
      passes: The first one read the prompts, each later one a step.
      group: Row of the prompt of each rollout.
      mask: A rollout's token is an input if another token follows.
    """
    prompts = int(group.max()) + 1
    dtype, blank = passes[0].dtype, torch.iinfo(passes[0].dtype).max
    steps = torch.full((*mask[:, 1:].shape, *passes[0].shape[1:]), blank, dtype=dtype)
    rows = torch.arange(len(mask))  # in the order of `draw_texts`
    for step, chosen in enumerate(passes[1:]):
        rows = rows[fill_from_end(~mask[rows, step + 1])]
        steps[rows, step] = chosen
    return Routing(
        prompt=passes[0].unflatten(0, (prompts, -1)),
        steps=steps,
        prompt_row=group,
        step_row=torch.arange(len(group)),
        is_open=False,
    )


def pack_routing(
    routing: Routing, prompt_mask: Bool[Tensor, "prompt width"], mask: Bool[Tensor, "rollout step"]
) -> dict[str, Tensor]:
    """Returns the experts of all input tokens as flat tensors that can be concatenated."""
    steps = routing.steps[routing.step_row, : mask.shape[1] - 1]
    width = prompt_mask.shape[1]
    return {
        PROMPT_EXPERTS: routing.prompt[:, routing.prompt.shape[1] - width :][prompt_mask],
        EXPERTS: steps[mask[:, 1:]],
    }


def require_routing(tensors: dict[str, Tensor]) -> None:
    """Raises ArtifactError if the tensors of `pack_routing` are missing."""
    if not ROUTING_LAYOUT.keys() <= tensors.keys():
        raise ArtifactError(
            "holds no routing for policy.routing replay_sampled; rerun its rollout stage with a "
            "mixture of experts, or set policy.routing to live"
        )


def unpack_routing(
    model: nn.Module,
    tensors: dict[str, Tensor],
    group: Int[Tensor, " rollout"],
    prompt_mask: Bool[Tensor, "prompt width"],
    mask: Bool[Tensor, "rollout step"],
) -> Routing:
    """Returns the routing from tensors of `pack_routing`.

    Raises:
      ArtifactError: If the tensors do not fit the model or the masks.
    """
    prompt, steps = _blank(model, *prompt_mask.shape), _blank(model, len(mask), mask.shape[1] - 1)
    for name, store, read in (
        (PROMPT_EXPERTS, prompt, prompt_mask),
        (EXPERTS, steps, mask[:, 1:]),
    ):
        wanted = (int(read.sum()), *store.shape[2:])
        if tensors[name].shape != wanted or tensors[name].dtype != store.dtype:
            raise ArtifactError(
                f"{name} must be {store.dtype} of {wanted}, got {tensors[name].dtype} of "
                f"{tuple(tensors[name].shape)}; rerun its rollout stage"
            )
        store[read] = tensors[name]
    return Routing(
        prompt=prompt,
        steps=steps,
        prompt_row=group,
        step_row=torch.arange(len(mask)),
        is_open=False,
    )


class _Choice(TorchFunctionMode):
    """Makes top-k return the given experts, where not blank, with their own gate scores."""

    def __init__(self, given: Integer[Tensor, "token choice"] | None) -> None:
        super().__init__()
        self.given = given
        self.chosen: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in CHOICES:
            return result
        chosen = result.indices
        if self.given is not None:
            given = self.given.to(chosen.device)
            blank = given == torch.iinfo(given.dtype).max
            chosen = torch.where(blank, chosen, given.long())
        self.chosen.append(chosen.detach())
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


@contextmanager
def _routed(
    routers: list[nn.Module],
    given: Integer[Tensor, "token layer choice"] | None,
    passes: list[Tensor],
) -> Iterator[None]:
    """Makes routers choose `given` and appends each pass through all of them to `passes`."""
    layers: list[Tensor] = []

    def forward(index: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        choice = _Choice(None if given is None else given[:, index])
        with choice:
            output = original(*args, **kwargs)
        (chosen,) = choice.chosen  # a router calls top-k once
        if not RECORDS.get():
            return output
        layers.append(chosen.to(_dtype(routers[0])))
        if len(layers) == len(routers):
            passes.append(torch.stack(layers, dim=1).cpu())
            layers.clear()
        return output

    own = [partial(forward, index, router.forward) for index, router in enumerate(routers)]
    outer = _swap_forwards(routers, own)  # those of an enclosing context
    try:
        yield
    finally:
        _swap_forwards(routers, outer)


def _swap_forwards(
    routers: list[nn.Module], forwards: Sequence[Callable[..., Any] | None]
) -> list[Callable[..., Any] | None]:
    """Sets the routers' forward methods (None: the class's) and returns the previous ones."""
    before = [vars(router).pop("forward", None) for router in routers]
    for router, own in zip(routers, forwards, strict=True):
        if own is not None:
            router.forward = own
    return before


def _fill(
    store: Integer[Tensor, "stored stored_position layer choice"],
    rows: Int[Tensor, " rollout"],
    positions: Int[Tensor, " position"],
    chosen: Integer[Tensor, "rollout position layer choice"],
) -> None:
    """Writes choices to the blank entries of some rows and positions."""
    index = (rows[:, None], positions)
    before = store[index]
    store[index] = torch.where(before == torch.iinfo(store.dtype).max, chosen, before)


def _blank(
    model: nn.Module, rows: int, positions: int
) -> Integer[Tensor, "row position layer choice"]:
    """Returns blank entries."""
    routers: list[Any] = find_routers(model)
    dtype = _dtype(routers[0])
    shape = (rows, positions, len(routers), int(routers[0].top_k))
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)


def _dtype(router: Any) -> torch.dtype:
    """Returns the smallest integer type for all expert numbers and the blank value."""
    is_small = int(router.num_experts) <= torch.iinfo(torch.uint8).max
    return torch.uint8 if is_small else torch.int16
