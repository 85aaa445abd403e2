"""Judges and rewards from parameters."""

from pathlib import Path
from typing import Any

import pandas as pd

from grpo.errors import ParameterError, brief, refused_by_library
from grpo.params.parameters import MEDIA_JUDGES, SIMULATOR, Parameters, Reward
from grpo.rewards.base import Judge, Viewer
from grpo.rewards.texts import TextJudge
from grpo.runtime.sources import Source, find_source, refusal
from grpo.sampling.scoring import RewardRule, rejected_gold_answers
from grpo.schema import PARAMS, HubBase

MOST_GOLD_ANSWERS = 256  # that are judged, of a table
MOST_REJECTED = 0.1  # of them: above it a run would be wasted
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
        judge=_find_viewer(params, data) or build_text_judge(reward),
        threshold=reward.threshold,
        maximize=reward.maximize,
        unfinished_penalty=reward.unfinished_penalty,
        score_range=reward.score_range,
    )


def check_gold_answers(params: Parameters, *tables: pd.DataFrame) -> str | None:
    """Returns a warning if the judge rejects some gold answers; None if it accepts them.

    Judges at most MOST_GOLD_ANSWERS of each table, evenly spaced; judges of media are not tested.

    Args:
      tables: Schema PROMPTS.

    Raises:
      MissingExtraError: If the judge's package is not installed.
      ParameterError: If it rejects more than MOST_REJECTED of them: such prompts teach that right
        answers are wrong.
    """
    reward = params.reward
    if reward.judge in (*MEDIA_JUDGES, SIMULATOR):
        return None
    tried = pd.concat([table.iloc[:: -(-len(table) // MOST_GOLD_ANSWERS)] for table in tables])
    rejected = rejected_gold_answers(build_text_judge(reward), tried, threshold=reward.threshold)
    if len(rejected) == 0:
        return None
    first = rejected.iloc[0]
    outcome = f"{first['status']} {first['score']:g} {first['detail']}".rstrip()
    sentence = (
        f"{PARAMS}: reward.judge {reward.judge} rejects the gold answers of {len(rejected)} of "
        f"{len(tried)} prompts that were tried; the first is prompt {first['prompt_id']}, answer "
        f"{brief(repr(first['answer']))}, {outcome}"
    )
    if len(rejected) > MOST_REJECTED * len(tried):
        raise ParameterError(f"{sentence}; take another judge or mend the answers")
    return sentence


def build_text_judge(reward: Reward) -> TextJudge:
    """Returns the judge of texts that the parameters name.

    Raises:
      MissingExtraError: If its package is not installed.
    """
    if reward.judge == SIMULATOR:
        from grpo.rewards.simulator import read_verdict

        return TextJudge(read_verdict, answer_pattern="^(.*)$", timeout_seconds=1.0)
    assert reward.answer_pattern is not None
    assert reward.timeout_seconds is not None
    return TextJudge(
        _find_judge(reward),
        answer_pattern=reward.answer_pattern,
        timeout_seconds=reward.timeout_seconds,
        score_range=reward.score_range,
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
    from grpo.modalities.shared.machine import prepare_machine
    from grpo.rewards.clip import view_by_clip

    reward = params.reward
    assert reward.model is not None
    prepare_machine(params.machine)
    weights = find_source(reward.model, data, parameter="reward.model")
    if processor is None or weights.is_local:
        readings = weights
    else:
        readings = find_source(processor, data, parameter="reward.model")
    model = _load_weights(weights).to(params.machine.device)
    return view_by_clip(model, _load_processor(readings))


def _load_weights(source: Source) -> Any:
    import torch
    from transformers import CLIPModel

    from_pretrained: Any = CLIPModel.from_pretrained
    with refused_by_library(lambda why: refusal(source, why)):
        model, found = from_pretrained(
            source.name,
            revision=source.revision,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=source.is_local,
            output_loading_info=True,
        )
    if found["missing_keys"]:  # of another class; transformers would draw them at random
        raise refusal(source, f"it has no {min(found['missing_keys'])}, which a CLIPModel has")
    return model.eval().requires_grad_(False)


def _load_processor(source: Source) -> Any:
    from transformers import CLIPProcessor

    from_pretrained: Any = CLIPProcessor.from_pretrained
    with refused_by_library(lambda why: refusal(source, why)):
        return from_pretrained(
            source.name,
            revision=source.revision,
            # The other backend resizes a little differently, and not every machine has it.
            backend="pil",
            trust_remote_code=False,
            local_files_only=source.is_local,
        )
