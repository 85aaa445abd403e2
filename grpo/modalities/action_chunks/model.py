"""A chunked action model: a backbone of `transformers` that decodes all actions at once.

The style of OpenVLA-OFT [Kim et al., 2025, arXiv 2502.19645]: discrete action tokens, decoded in
parallel by attention that goes both ways, the observation's numbers projected to a position, and
what a vision encoder makes of a picture to one per patch.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from grpo.errors import ArtifactError, refused_by_library
from grpo.modalities.shared.directories import WEIGHTS, read_trainable
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.tensors import write_tensors

ACTIONS = "actions.json"
EYES = "eyes"  # a directory: the vision encoder's configuration
CLIPPED = 6.0  # deviations: observations outside what the demonstrations showed
HEAD_STD = 0.01  # of the head's first weights: all bins start about equally likely


class ChunkShape(NamedTuple):
    """What a model reads and decodes."""

    observations: int  # numbers of a state: the simulator's first ones
    pixels: int  # of a picture's side; 0: it sees none
    length: int  # actions of a chunk, in time
    actions: int  # dimensions of an action, each in [-1, 1]
    bins: int  # values that a dimension can take
    positions: int  # of the backbone that decode a chunk; each the same share of its length

    @property
    def tokens(self) -> int:
        """Action tokens of a chunk."""
        return self.length * self.actions


class ActionChunkModel(nn.Module):
    """Instruction, picture, state and decoding positions through a backbone; a head per position.

    OpenVLA-OFT decodes one position per action token; here `positions` is free, for what a
    position costs dominates small models.
    """

    def __init__(
        self, backbone: PreTrainedModel, shape: ChunkShape, eyes: PreTrainedModel | None = None
    ) -> None:
        """Args:
        eyes: A vision encoder, if the shape has pixels.
        """
        super().__init__()
        hidden = backbone.config.hidden_size
        self.shape = shape
        self.backbone = backbone
        self.eyes = eyes
        self.patches = 0  # positions that a picture takes
        if eyes is not None:
            self.patches = _leave_out_unused(eyes, shape.pixels)
            self.sight = nn.Linear(eyes.config.hidden_size, hidden)
        self.state = nn.Linear(shape.observations, hidden)
        self.queries = nn.Parameter(torch.randn(shape.positions, hidden) * 0.5)
        self.head = nn.Linear(hidden, shape.tokens // shape.positions * shape.bins)
        nn.init.normal_(self.head.weight, std=HEAD_STD)
        self.register_buffer("mean", torch.zeros(shape.observations))
        self.register_buffer("scale", torch.ones(shape.observations))

    def forward(
        self,
        instruction: Int[Tensor, "row width"],
        instruction_mask: Bool[Tensor, "row width"],
        observation: Float[Tensor, "row number"],
        picture: UInt8[Tensor, "row 3 pixel pixel"] | None = None,
    ) -> Float[Tensor, "row token bin"]:
        """Returns logits of every action token of a chunk: time first, then dimension.

        Args:
          picture: Needed if the model has eyes.
        """
        rows = len(observation)
        mean, scale = self.get_buffer("mean"), self.get_buffer("scale")
        state = ((observation - mean) / scale).clamp(-CLIPPED, CLIPPED)
        words = self.backbone.get_input_embeddings()(instruction)
        dtype = words.dtype
        given = [words, self.state(state.to(dtype))[:, None]]
        if self.eyes is not None:
            assert picture is not None
            given.append(self._look(picture))
        inputs = torch.cat([*given, self.queries.expand(rows, -1, -1).to(dtype)], dim=1)
        seen = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        seen[:, : instruction.shape[1]] = instruction_mask
        hidden = self.backbone(
            inputs_embeds=inputs,
            attention_mask=_both_ways(seen, dtype),
            # Counted without padding, whose width is the batch's.
            position_ids=(seen.long().cumsum(dim=1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state[:, -self.shape.positions :]
        logits: Tensor = self.head(hidden)
        return logits.reshape(rows, self.shape.tokens, self.shape.bins)

    def _look(
        self, picture: UInt8[Tensor, "row 3 pixel pixel"]
    ) -> Float[Tensor, "row patch width"]:
        """Returns what the backbone reads of pictures, whose colors become -1 to 1."""
        assert self.eyes is not None
        values = (picture / 127.5 - 1).to(self.eyes.dtype)
        seen: Tensor = self.sight(self.eyes(pixel_values=values).last_hidden_state)
        return seen


def _leave_out_unused(eyes: PreTrainedModel, pixels: int) -> int:
    """Returns the patches of a picture; parameters that they do not depend on become buffers.

    A pooling head, or a mask's token: they never have a gradient, so no moments in the optimizer.
    """
    blank = torch.zeros(1, 3, pixels, pixels, dtype=eyes.dtype, device=eyes.device)
    with torch.enable_grad():
        seen = eyes(pixel_values=blank).last_hidden_state
    names, parameters = zip(*eyes.named_parameters(), strict=True)
    gradients = torch.autograd.grad(seen.sum(), parameters, allow_unused=True)
    for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
        if gradient is None:
            path, _, own = name.rpartition(".")
            module = eyes.get_submodule(path)
            delattr(module, own)
            module.register_buffer(own, parameter.detach())
    return int(seen.shape[1])


def _both_ways(
    seen: Bool[Tensor, "row position"], dtype: torch.dtype
) -> Float[Tensor, "row 1 position position"]:
    """Returns a mask under which every position sees all others that are `seen`.

    Four dimensions, so that no version of a backbone makes it causal in silence: with a fork of
    transformers that did, OpenVLA-OFT fell from 98 to 60 % (its issue 135).
    """
    rows, positions = seen.shape
    mask = torch.zeros(rows, 1, 1, positions, dtype=dtype, device=seen.device)
    mask = mask.masked_fill(~seen[:, None, None], torch.finfo(dtype).min)
    return mask.expand(rows, 1, positions, positions)


def encode_instructions(
    tokenizer: Any, instructions: list[str]
) -> tuple[Int[Tensor, "prompt width"], Bool[Tensor, "prompt width"]]:
    """Returns tokens padded on the right, and their mask."""
    encoded = tokenizer(instructions, padding=True, padding_side="right", return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"].bool()


def save_action_model(directory: Path, model: ActionChunkModel, tokenizer: Any) -> None:
    """Writes the backbone's config, the shape, the weights and the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    model.backbone.config.save_pretrained(directory)
    if model.eyes is not None:
        model.eyes.config.save_pretrained(directory / EYES)
    write_json(directory / ACTIONS, model.shape._asdict())
    tokenizer.save_pretrained(directory)
    write_tensors(directory / WEIGHTS, dict(model.state_dict()))


def read_shape(directory: Path) -> ChunkShape:
    """Returns what the model of a directory reads and decodes.

    Raises:
      ArtifactError: If the file is missing or broken.
    """
    path = directory / ACTIONS
    try:
        return ChunkShape(**read_json(path))
    except TypeError as error:
        raise ArtifactError(f"{path}: must be a chunk's shape, {error}; rerun its stage") from None


def load_action_model(directory: Path, dtype: torch.dtype) -> ActionChunkModel:
    """Returns the model of a directory, in evaluation mode: no dropout (rule U26).

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    read_json(directory / "config.json")  # transformers does not say which file is broken
    shape = read_shape(directory)
    with refused_by_library(
        lambda why: ArtifactError(
            f"{directory}: must be a whole policy directory, {why}; rerun its stage"
        )
    ):
        backbone = _configured(directory)
        eyes = _configured(directory / EYES) if shape.pixels else None
    model = ActionChunkModel(backbone, shape, eyes).to(dtype)
    read_trainable(directory, model, optimizer=None)
    return model.eval()


def _configured(directory: Path) -> Any:
    """Returns a model of the configuration in a directory."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return AutoModel.from_config(config, trust_remote_code=False)
