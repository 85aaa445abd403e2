"""An action-chunk model: a backbone of `transformers` that decodes all actions in parallel.

It follows OpenVLA-OFT [Kim et al., 2025, arXiv 2502.19645]: discrete action tokens, parallel
decoding with bidirectional attention, a projection of the state to one position, and a projection
of the vision encoder's patch features to one position each.
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
VISION_CONFIG = "eyes"  # stored name: the directory of the vision encoder's configuration
CLIPPED = 6.0  # deviations; clips observations far outside the demonstrations
HEAD_STD = 0.01  # of the head's initial weights, so that all bins start about equally likely


class ChunkShape(NamedTuple):
    """Input and output sizes of a model."""

    observations: int  # size of the observed state: the first numbers of the simulator's
    pixels: int  # side length of a picture; 0: no pictures
    length: int  # actions per chunk
    actions: int  # dimensions of an action, each in [-1, 1]
    bins: int  # discrete values of an action dimension
    positions: int  # backbone positions that decode a chunk, each an equal share of its length

    @property
    def tokens(self) -> int:
        """Action tokens per chunk."""
        return self.length * self.actions


class ActionChunkModel(nn.Module):
    """Maps instruction, state and picture to logits of a chunk's action tokens.

    The backbone reads all inputs and `positions` learned queries; a shared head decodes each query.
    Unlike OpenVLA-OFT, which decodes one position per action token, `positions` is a parameter: the
    cost per position dominates small models.
    """

    def __init__(
        self, backbone: PreTrainedModel, shape: ChunkShape, vision: PreTrainedModel | None = None
    ) -> None:
        """Args:
        vision: The vision encoder; required if the shape has pixels.
        """
        super().__init__()
        hidden = backbone.config.hidden_size
        self.shape = shape
        self.backbone = backbone
        # `eyes` and `sight` are stored in the names of tensors: encoder and projector.
        self.eyes = vision
        self.patches = 0  # backbone positions of a picture
        if vision is not None:
            self.patches = _freeze_unused(vision, shape.pixels)
            self.sight = nn.Linear(vision.config.hidden_size, hidden)
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
        """Returns logits of all action tokens of a chunk, ordered by time, then dimension.

        Args:
          picture: Required if the model has a vision encoder.
        """
        rows = len(observation)
        mean, scale = self.get_buffer("mean"), self.get_buffer("scale")
        state = ((observation - mean) / scale).clamp(-CLIPPED, CLIPPED)
        words = self.backbone.get_input_embeddings()(instruction)
        dtype = words.dtype
        given = [words, self.state(state.to(dtype))[:, None]]
        if self.eyes is not None:
            assert picture is not None
            given.append(self._embed_picture(picture))
        inputs = torch.cat([*given, self.queries.expand(rows, -1, -1).to(dtype)], dim=1)
        seen = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        seen[:, : instruction.shape[1]] = instruction_mask
        hidden = self.backbone(
            inputs_embeds=inputs,
            attention_mask=_bidirectional_mask(seen, dtype),
            # Positions skip padding, whose width depends on the batch.
            position_ids=(seen.long().cumsum(dim=1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state[:, -self.shape.positions :]
        logits: Tensor = self.head(hidden)
        return logits.reshape(rows, self.shape.tokens, self.shape.bins)

    def _embed_picture(
        self, picture: UInt8[Tensor, "row 3 pixel pixel"]
    ) -> Float[Tensor, "row patch width"]:
        """Returns the projected patch features of pictures, colors scaled to [-1, 1]."""
        assert self.eyes is not None
        values = (picture / 127.5 - 1).to(self.eyes.dtype)
        seen: Tensor = self.sight(self.eyes(pixel_values=values).last_hidden_state)
        return seen


def _freeze_unused(vision: PreTrainedModel, pixels: int) -> int:
    """Returns the number of patches; turns parameters without influence on them into buffers.

    A pooling head or a mask token never has a gradient, so the optimizer has no moments for it.
    """
    blank = torch.zeros(1, 3, pixels, pixels, dtype=vision.dtype, device=vision.device)
    with torch.enable_grad():
        seen = vision(pixel_values=blank).last_hidden_state
    names, parameters = zip(*vision.named_parameters(), strict=True)
    gradients = torch.autograd.grad(seen.sum(), parameters, allow_unused=True)
    for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
        if gradient is None:
            path, _, own = name.rpartition(".")
            module = vision.get_submodule(path)
            delattr(module, own)
            module.register_buffer(own, parameter.detach())
    return int(seen.shape[1])


def _bidirectional_mask(
    seen: Bool[Tensor, "row position"], dtype: torch.dtype
) -> Float[Tensor, "row 1 position position"]:
    """Returns a mask under which every position attends to all positions in `seen`.

    The mask has four dimensions so that no version of a backbone makes it causal silently. With a
    fork of transformers that did, OpenVLA-OFT fell from 98 to 60 % (its issue 135).
    """
    rows, positions = seen.shape
    mask = torch.zeros(rows, 1, 1, positions, dtype=dtype, device=seen.device)
    mask = mask.masked_fill(~seen[:, None, None], torch.finfo(dtype).min)
    return mask.expand(rows, 1, positions, positions)


def encode_instructions(
    tokenizer: Any, instructions: list[str]
) -> tuple[Int[Tensor, "prompt width"], Bool[Tensor, "prompt width"]]:
    """Returns tokens padded on the right and their mask."""
    encoded = tokenizer(instructions, padding=True, padding_side="right", return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"].bool()


def save_action_model(directory: Path, model: ActionChunkModel, tokenizer: Any) -> None:
    """Writes configurations, shape, weights and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    model.backbone.config.save_pretrained(directory)
    if model.eyes is not None:
        model.eyes.config.save_pretrained(directory / VISION_CONFIG)
    write_json(directory / ACTIONS, model.shape._asdict())
    tokenizer.save_pretrained(directory)
    write_tensors(directory / WEIGHTS, dict(model.state_dict()))


def read_shape(directory: Path) -> ChunkShape:
    """Returns the input and output sizes of a stored model.

    Raises:
      ArtifactError: If the file is missing or broken.
    """
    path = directory / ACTIONS
    try:
        return ChunkShape(**read_json(path))
    except TypeError as error:
        message = f"{path}: must hold the fields of a chunk's shape, {error}; rerun its stage"
        raise ArtifactError(message) from None


def load_action_model(directory: Path, dtype: torch.dtype) -> ActionChunkModel:
    """Returns the model of a directory in evaluation mode: no dropout (rule U26).

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    read_json(directory / "config.json")  # transformers does not say which file is broken
    shape = read_shape(directory)
    with refused_by_library(
        lambda why: ArtifactError(
            f"{directory}: must be a complete policy directory, {why}; rerun its stage"
        )
    ):
        backbone = _configured(directory)
        vision = _configured(directory / VISION_CONFIG) if shape.pixels else None
    model = ActionChunkModel(backbone, shape, vision).to(dtype)
    read_trainable(directory, model, optimizer=None)
    return model.eval()


def _configured(directory: Path) -> Any:
    """Returns a model with fresh weights for the configuration in a directory."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return AutoModel.from_config(config, trust_remote_code=False)
