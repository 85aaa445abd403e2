"""Prompts as a model reads them: tokens with places for an image, and the image's inputs."""

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from grpo.errors import ArtifactError, ParameterError, brief, refused_by_library
from grpo.modalities.shared.images import split_prompt
from grpo.modalities.vision_language.families import find_family
from grpo.runtime.sources import Source, refusal
from grpo.schema import PARAMS

CACHED_IMAGES = 256  # updates read the same prompts several times
ImageInputs = dict[str, Tensor]  # of the vision tower


class PromptReader:
    """A tokenizer and an image processor. transformers' own Processor classes need torchvision."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_processor: Any,
        config: Any,
        *,
        uses_chat_template: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.config = config
        self.uses_chat_template = uses_chat_template
        self._family = find_family(config)
        self._process = lru_cache(CACHED_IMAGES)(self._process_image)

    def read_prompt(self, prompt: str) -> tuple[list[int], bytes]:
        """Returns the tokens of a prompt, with one token per feature of its image, and the image.

        Raises:
          ParameterError: If the prompt has no image or another one that cannot be decoded.
        """
        image, question = split_prompt(prompt)
        token: Any = self.tokenizer.convert_ids_to_tokens(self.config.image_token_id)
        if token in question:
            raise ParameterError(
                f"{PARAMS}: task must give questions without {token}, got {brief(repr(question))}"
            )
        places = self._family.expand(token, self.config, self._process(image))
        text = self.frame(question, token).replace(token, places, 1)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]), image

    def frame(self, question: str, token: str) -> str:
        """Returns the text of a question with one image token."""
        if self.uses_chat_template:
            content = [{"type": "image"}, {"type": "text", "text": question}]
            return str(
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        frame = {
            key.removesuffix("_token_id"): self.tokenizer.convert_ids_to_tokens(
                getattr(self.config, key)
            )
            for key in self._family.marks
        }
        start = self.tokenizer.bos_token or ""
        return self._family.plain.format(**frame, start=start, question=question)

    def read_images(self, images: Sequence[bytes]) -> ImageInputs:
        """Returns the inputs of the vision tower for some images together."""
        each = [self._process(image) for image in images]
        names = [name for name, value in each[0].items() if isinstance(value, Tensor)]
        return {name: _join([inputs[name] for inputs in each]) for name in names}

    def save_pretrained(self, directory: Path) -> None:
        """Writes the files of tokenizer and image processor."""
        self.tokenizer.save_pretrained(directory)
        self.image_processor.save_pretrained(directory)

    def _process_image(self, image: bytes) -> Mapping[str, Any]:
        # Imported here: only runs with images need Pillow.
        from PIL import Image

        try:
            picture = Image.open(io.BytesIO(image)).convert("RGB")
        except OSError as error:
            raise ParameterError(
                f"{PARAMS}: task must give images that Pillow can read, {brief(error)}"
            ) from None
        processed: Mapping[str, Any] = self.image_processor(
            images=[picture], return_tensors="pt", **self._family.read_options
        )
        return dict(processed)


def require_image_template(reader: PromptReader) -> None:
    """Raises ParameterError unless the chat template renders an image and a question."""
    token: Any = reader.tokenizer.convert_ids_to_tokens(reader.config.image_token_id)
    with refused_by_library(
        lambda why: ParameterError(
            f"{PARAMS}: policy.prompt_format chat needs a chat template with images: {why}; set "
            "plain or correct the template"
        )
    ):
        text = reader.frame("a probe", token)
    if text.count(token) != 1 or "a probe" not in text:
        raise ParameterError(
            f"{PARAMS}: policy.prompt_format chat: the chat template must render one {token} and "
            f"the question, got {brief(repr(text))}; correct it or set plain"
        )


def read_image_processor(source: Source) -> Any:
    """Returns the image processor at a source.

    Raises:
      ParameterError: If it cannot be loaded.
    """
    with refused_by_library(lambda why: refusal(source, why)):
        return AutoImageProcessor.from_pretrained(
            source.name,
            revision=source.revision,
            backend="pil",
            trust_remote_code=False,
            local_files_only=source.is_local,
        )


def load_image_processor(directory: Path) -> Any:
    """Returns the image processor of a policy directory.

    Raises:
      ArtifactError: If its file is missing or broken.
    """

    def refuse(why: str) -> ArtifactError:
        return ArtifactError(f"{directory}: must hold an image processor, {why}; rerun its stage")

    with refused_by_library(refuse):
        return AutoImageProcessor.from_pretrained(
            directory, backend="pil", trust_remote_code=False, local_files_only=True
        )


def _join(parts: list[Tensor]) -> Tensor:
    """Returns inputs of several images; those of one split into fewer tiles are padded with 0."""
    if len(parts) == 1:
        return parts[0]  # of the cache of images: not to be written to
    if parts[0].ndim < 4 or len({each.shape[1:] for each in parts}) == 1:
        return torch.cat(parts)
    shape = [max(sizes) for sizes in zip(*(each.shape[1:] for each in parts))]
    joined = parts[0].new_zeros(len(parts), *shape)
    for index, each in enumerate(parts):
        place: Any = (index, *(slice(size) for size in each.shape[1:]))
        joined[place] = each[0]
    return joined
