"""Base models of vision-language policies: fresh, or from a directory, the hub or S3."""

import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from grpo.errors import ArtifactError, ParameterError, brief, located
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.directories import save_base
from grpo.modalities.shared.images import join_prompt, split_prompt
from grpo.modalities.shared.models import (
    make_fresh_model,
    read_model,
    read_tokenizer,
    require_embedded,
    require_known_keys,
    shape_model,
)
from grpo.modalities.shared.restoring import place_round
from grpo.modalities.shared.text_modality import Decoding
from grpo.modalities.shared.text_policy import pad_rows
from grpo.modalities.shared.texts import PASS_ERRORS, TOLERANCES, Pairs
from grpo.modalities.shared.tokenizers import make_marked_tokenizer
from grpo.modalities.shared.warmup import (
    BasePolicy,
    WarmupSettings,
    WarmupUpdate,
    fit,
    split_by_length,
    warmup_settings,
    with_remedy,
)
from grpo.modalities.vision_language.families import FAMILIES, Family, find_family
from grpo.modalities.vision_language.modality import ScratchBase, VisionLanguagePolicyParams
from grpo.modalities.vision_language.policy import (
    VisionLanguagePolicy,
    VisionLanguageTrajectory,
)
from grpo.modalities.vision_language.reading import (
    PromptReader,
    read_image_processor,
    require_image_template,
)
from grpo.runtime.dry_run import DryRun
from grpo.runtime.machine import DTYPES
from grpo.runtime.seeds import derive_seed
from grpo.runtime.sources import find_local_source, find_source
from grpo.schema import PARAMS
from grpo.types import Cost

BASE = "policy.base"
PROBES = ["one", "another longer question"]  # of unequal lengths
PROBE_STEPS = 4
PROBE_PIXELS = 64
WARMUP_PARTS = 2  # of an update's rows, by length: more pad less but need more passes


class MadeBase:
    """A model with its reader; a fresh one is made from the texts of its warm-up."""

    def __init__(self, params: RunParams[VisionLanguagePolicyParams], data: Path) -> None:
        self._params = params
        self._made: tuple[PreTrainedModel, PromptReader] | None = None
        if not isinstance(params.policy.base, ScratchBase):
            self._made = _checked(params, *_read_base(params, data))

    def warm_up(self, table: pd.DataFrame) -> Iterator[WarmupUpdate]:
        """Yields the updates of a fresh model; an imported one has none.

        Raises:
          DivergedError: If a number is not finite or the final loss is far above the initial one.
          ParameterError: If the class refuses its configuration.
        """
        base = self._params.policy.base
        if not isinstance(base, ScratchBase):
            return
        pairs: Pairs = list(zip(table["prompt"], table["solution"]))
        words = [text for prompt, answer in pairs for text in (split_prompt(prompt)[1], answer)]
        self._made = _checked(self._params, *make_fresh(self._params, base, words))
        settings = warmup_settings(base.warmup, self._params.seed)
        yield from with_remedy(warm_up(*self._made, pairs, settings), settings)

    def save(self, directory: Path) -> None:
        """Writes the base policy's directory."""
        assert self._made is not None
        model, reader = self._made
        save_base(directory, model, reader)


def make_base_policy(params: RunParams[VisionLanguagePolicyParams], data: Path) -> BasePolicy:
    """Returns the base policy that the parameters describe.

    Raises:
      ParameterError: If the source does not exist or is of another family.
      ArtifactError: If the model cannot be sampled.
    """
    fresh = params.policy.base
    made = MadeBase(params, data)
    return BasePolicy(
        num_updates=fresh.warmup.updates if isinstance(fresh, ScratchBase) else 0,
        warm_up=made.warm_up,
        save=made.save,
    )


def make_fresh(
    params: RunParams[VisionLanguagePolicyParams], base: ScratchBase, texts: Sequence[str]
) -> tuple[PreTrainedModel, PromptReader]:
    """Returns a fresh model and a reader with the words of some texts.

    Raises:
      ParameterError: If the class is of no family or refuses its configuration.
    """
    family = _family_of_class(base.architecture)
    marks = [*family.marks.values(), *family.more_marks]
    tokenizer = make_marked_tokenizer(texts, marks)
    ids: dict[str, Any] = {
        name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")
    }
    known = {
        "vision_config": base.vision_config,
        "text_config": {**base.text_config, **ids, "vocab_size": len(tokenizer)},
        **{key: tokenizer.convert_tokens_to_ids(mark) for key, mark in family.marks.items()},
    }
    torch.manual_seed(derive_seed(params.seed, "base"))
    model = make_fresh_model(
        base.architecture,
        base.config,
        known,
        ending="ForConditionalGeneration",
        what="a vision-language class of transformers such as PaliGemmaForConditionalGeneration",
        parameter=BASE,
    )
    for name in ("vision_config", "text_config"):
        kind: Any = type(getattr(model.config, name))
        require_known_keys(kind, getattr(base, name), parameter=f"{BASE}.{name}")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    reader = PromptReader(
        tokenizer,
        family.make_image_processor(model.config),
        model.config,
        uses_chat_template=params.policy.prompt_format == "chat",
    )
    return model.to(DTYPES[params.machine.dtype]).eval(), reader


def load_unfilled(
    params: RunParams[VisionLanguagePolicyParams], *, data: Path, decoding: Decoding, run: DryRun
) -> VisionLanguagePolicy:
    """Returns the policy of the base for a dry run.

    Raises:
      ParameterError: If the base's configuration is not on this machine.
    """
    base = params.policy.base
    with torch.device("meta"):
        if isinstance(base, ScratchBase):
            model, reader = make_fresh(params, base, PROBES)
        else:
            model = shape_model(AutoModelForImageTextToText, base, data, parameter=BASE)
            model.to(DTYPES[params.machine.dtype])
            reader = PromptReader(
                read_tokenizer(base, data, parameter=BASE),
                read_image_processor(find_local_source(base, data, parameter=BASE)),
                model.config,
                uses_chat_template=params.policy.prompt_format == "chat",
            )
    place_round(params, model, run)
    with run:
        return VisionLanguagePolicy(model, reader, decoding=decoding)


@torch.no_grad()
def require_sampling(model: PreTrainedModel, reader: PromptReader) -> None:
    """Raises ArtifactError unless sampling gives the log-probs of the model's own forward pass.

    A model can fail if it attends or numbers positions differently, or has its own cache.
    """
    what = f"{type(model).__name__} cannot be sampled as a vision-language model"
    try:
        worst = _largest_difference(model, reader)
    except PASS_ERRORS as error:
        raise ArtifactError(f"{what}, {brief(error)}; choose another model") from None
    if not worst < TOLERANCES[model.dtype]:
        raise ArtifactError(
            f"{what}: log-probs of sampling must equal those of the model's own pass, got a "
            f"difference of {worst:.2g} nats; choose another model"
        )


def own_logits(model: Any, policy: VisionLanguagePolicy, prompt: str, tokens: Tensor) -> Tensor:
    """Returns the logits of some answer tokens from the model's own forward pass."""
    read, _, images = policy.encode([prompt])
    joined = torch.cat([read, tokens[None]], dim=1)
    is_answer = torch.arange(joined.shape[1])[None] >= read.shape[1]
    inputs: dict[str, Any] = {
        "token_type_ids": is_answer.int(),
        "mm_token_type_ids": ((joined == model.config.image_token_id) & ~is_answer).int(),
    }
    taken = inspect.signature(model.forward).parameters
    logits: Tensor = model(
        input_ids=joined.to(model.device),
        attention_mask=torch.ones_like(joined).to(model.device),
        **{name: each.to(model.device) for name, each in inputs.items() if name in taken},
        **{k: v.to(model.device) for k, v in policy.reader.read_images(images).items()},
        use_cache=False,
    ).logits[0, read.shape[1] - 1 : -1]
    return logits.float().cpu()


def warm_up(
    model: PreTrainedModel,
    reader: PromptReader,
    pairs: Pairs,
    settings: WarmupSettings,
) -> Iterator[WarmupUpdate]:
    """Trains on (prompt, answer) pairs with cross-entropy on answer and end token.

    The log-probs are those of updates: attention, positions and FLOPs are the same.

    Raises:
      DivergedError: If a number is not finite or the final loss is far above the initial one.
    """
    policy = VisionLanguagePolicy(model, reader, decoding=Decoding(temperature=1.0, max_steps=1))
    tokenizer = reader.tokenizer
    questions = tokenizer([split_prompt(prompt)[1] for prompt, _ in pairs])["input_ids"]
    answers = [
        [*answer, tokenizer.eos_token_id]
        for answer in tokenizer([text for _, text in pairs], add_special_tokens=False)["input_ids"]
    ]

    def collate(rows: list[int]) -> VisionLanguageTrajectory:
        prompt, prompt_mask, images = policy.encode([pairs[row][0] for row in rows])
        tokens, mask = pad_rows([answers[row] for row in rows], left=False)
        return VisionLanguageTrajectory(
            group=torch.arange(len(rows)),
            prompt=prompt,
            prompt_mask=prompt_mask,
            images=images,
            tokens=tokens,
            mask=mask,
        )

    def prepare(chosen: list[int]) -> tuple[Callable[[], Tensor], Cost]:
        parts = split_by_length(
            chosen, lambda row: len(questions[row] + answers[row]), WARMUP_PARTS
        )
        batches = [collate(rows) for rows in parts]
        cost = sum(map(policy.training_cost, batches), Cost())
        total = sum(int(batch.mask.sum()) for batch in batches)

        def compute() -> Tensor:
            sums = [policy.log_prob(batch).sum() for batch in batches]
            return -torch.stack(sums).sum() / total

        return compute, cost

    yield from fit(model, len(pairs), settings, prepare)


def _read_base(
    params: RunParams[VisionLanguagePolicyParams], data: Path
) -> tuple[PreTrainedModel, PromptReader]:
    """Returns an imported model and its reader."""
    base = params.policy.base
    assert not isinstance(base, ScratchBase)
    dtype = DTYPES[params.machine.dtype]
    model = read_model(AutoModelForImageTextToText, base, data, parameter=BASE, dtype=dtype).eval()
    find_family(model.config)
    tokenizer = read_tokenizer(base, data, parameter=BASE)
    require_embedded(model, tokenizer, parameter=BASE)
    reader = PromptReader(
        tokenizer,
        read_image_processor(find_source(base, data, parameter=BASE)),
        model.config,
        uses_chat_template=params.policy.prompt_format == "chat",
    )
    if reader.uses_chat_template:
        require_image_template(reader)
    return model, reader


def _checked(
    params: RunParams[VisionLanguagePolicyParams], model: PreTrainedModel, reader: PromptReader
) -> tuple[PreTrainedModel, PromptReader]:
    """Returns a model on the machine's device with its reader, after a check of its sampling."""
    nn.Module.to(model, params.machine.device)
    with located(f"{PARAMS}: {BASE}"):
        require_sampling(model, reader)
    return model, reader


def _family_of_class(architecture: str) -> Family:
    """Returns the family of a model class.

    Raises:
      ParameterError: If there is none.
    """
    config: Any = getattr(getattr(transformers, architecture, None), "config_class", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None:
        raise ParameterError(
            f"{PARAMS}: {BASE}.architecture must be a class of a model of type "
            f"{', '.join(FAMILIES)}, such as PaliGemmaForConditionalGeneration, got "
            f"{architecture!r}"
        )
    return family


def _largest_difference(model: PreTrainedModel, reader: PromptReader) -> float:
    """Returns the largest difference of log-probs between sampling and the model, in nats."""
    settings = Decoding(temperature=1.0, max_steps=PROBE_STEPS)
    policy = VisionLanguagePolicy(model, reader, decoding=settings)
    prompts = [join_prompt(_probe_image(index), text) for index, text in enumerate(PROBES)]
    generator = torch.Generator().manual_seed(0)
    trajectory, sampled = policy.sample(prompts, group_sizes=[2, 1], generator=generator)
    worst = float((policy.log_prob(trajectory).cpu() - sampled).abs().max())
    for row, group in enumerate(trajectory.group.tolist()):
        kept = trajectory.mask[row]
        tokens = trajectory.tokens[row][kept]
        if model.config.image_token_id in tokens:  # the model's own pass wants an image for it
            continue
        logp = own_logits(model, policy, prompts[group], tokens).log_softmax(dim=1)
        chosen = logp.gather(1, tokens[:, None])[:, 0]
        worst = max(worst, float((chosen - sampled[row][kept]).abs().max()))
    return worst


def _probe_image(shade: int) -> bytes:
    """Returns an image whose halves differ, as PNG."""
    # Imported here: only runs with images need Pillow.
    from PIL import Image

    image = Image.new("RGB", (PROBE_PIXELS, PROBE_PIXELS), (40, 60 + 80 * shade, 200))
    image.paste((220, 30, 90), (0, 0, PROBE_PIXELS // 2, PROBE_PIXELS))
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()
