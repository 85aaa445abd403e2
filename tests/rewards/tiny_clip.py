"""A CLIP of a few thousand parameters with a tokenizer of bytes, as a directory."""

from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPModel, CLIPProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from grpo.modalities.shared.tokenizers import make_caption_tokenizer

PROMPT_TOKENS = 12
SIZE = 16  # pixels


def save_clip(directory: Path, *, seed: int = 0) -> tuple[CLIPModel, CLIPProcessor]:
    """Writes model and processor, and returns them."""
    tokenizer = make_caption_tokenizer()
    tower = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {
        **tower,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": PROMPT_TOKENS,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {**tower, "image_size": SIZE, "patch_size": 8}
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()
    processor = CLIPProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
        ),
        tokenizer=tokenizer,
    )
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return model, processor
