"""Judges and rewards from parameters."""

from pathlib import Path
from typing import Any

from grpo.build.sources import Source, find_source, refusal
from grpo.params.parameters import Parameters
from grpo.params.policy import HubBase
from grpo.params.reward import SIMULATOR, Reward
from grpo.rewards.base import Judge, Viewer
from grpo.scoring import RewardRule, TextJudge

# The processor that PickScore's model card names.
PICKSCORE_PROCESSOR = HubBase(
    source="hub",
    id="laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    revision="1c2b8495b28150b8a4922ee1c8edee224c284c0c",
)


def build_reward(params: Parameters, data: Path) -> RewardRule:
    """Returns how rollouts are judged.

    Args:
      data: Where `reward.model` is, if it is a directory.

    Raises:
      MissingExtraError: If the judge's package is not installed.
      ParameterError: If the judge's model cannot be loaded, or its device is not there.
    """
    reward = params.reward
    return RewardRule(
        judge=_find_viewer(params, data) or _text_judge(reward),
        threshold=reward.threshold,
        maximize=reward.maximize,
        unfinished_penalty=reward.unfinished_penalty,
    )


def _text_judge(reward: Reward) -> TextJudge:
    if reward.judge == SIMULATOR:
        from grpo.rewards.simulator import read_verdict

        return TextJudge(judge=read_verdict, answer_pattern="^(.*)$", timeout_seconds=1.0)
    assert reward.answer_pattern is not None
    assert reward.timeout_seconds is not None
    return TextJudge(
        judge=_find_judge(reward),
        answer_pattern=reward.answer_pattern,
        timeout_seconds=reward.timeout_seconds,
    )


def _find_judge(reward: Reward) -> Judge:
    # Imported here: a judge's packages take a second that runs with another judge need not wait.
    match reward.judge:
        case "reasoning_gym":
            from grpo.rewards.reasoning import score_answer

            return score_answer
        case "math":
            from grpo.rewards.math import verify_math

            return verify_math
    raise AssertionError(reward.judge)


def _find_viewer(params: Parameters, data: Path) -> Viewer | None:
    """Returns the judge of media, or None if text is judged."""
    match params.reward.judge:
        case "ocr":
            from grpo.rewards.ocr import view_texts

            return view_texts
        case "moving_ocr":
            from grpo.rewards.moving_ocr import view_moving_texts

            return view_moving_texts
        case "clip":
            return _load_clip(params, data, None)
        case "pickscore":
            return _load_clip(params, data, PICKSCORE_PROCESSOR)
    return None


def _load_clip(params: Parameters, data: Path, processor: HubBase | None) -> Viewer:
    """Returns a judge by a CLIP model on the machine's device, in float32.

    bfloat16 has three digits, too few to tell the rollouts of a group apart.

    Args:
      processor: Whose, if the model comes from the hub; None: its own.
    """
    from grpo.build.machine import prepare_machine
    from grpo.rewards.clip import view_by_clip

    reward = params.reward
    assert reward.model is not None
    assert reward.score_range is not None
    prepare_machine(params.machine)
    weights = find_source(reward.model, data, parameter="reward.model")
    if processor is None or weights.is_local:
        readings = weights
    else:
        readings = find_source(processor, data, parameter="reward.model")
    model = _load_weights(weights).to(params.machine.device)
    return view_by_clip(model, _load_processor(readings), score_range=reward.score_range)


def _load_weights(source: Source) -> Any:
    import torch
    from safetensors import SafetensorError
    from transformers import CLIPModel

    from_pretrained: Any = CLIPModel.from_pretrained
    try:
        model, found = from_pretrained(
            source.name,
            revision=source.revision,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=source.is_local,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
        raise refusal(source, error) from None
    if found["missing_keys"]:  # of another class; transformers would draw them at random
        raise refusal(source, f"it has no {min(found['missing_keys'])}, which a CLIPModel has")
    return model.eval().requires_grad_(False)


def _load_processor(source: Source) -> Any:
    from transformers import CLIPProcessor

    from_pretrained: Any = CLIPProcessor.from_pretrained
    try:
        return from_pretrained(
            source.name,
            revision=source.revision,
            # The other backend resizes a little differently, and not every machine has it.
            backend="pil",
            trust_remote_code=False,
            local_files_only=source.is_local,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise refusal(source, error) from None
