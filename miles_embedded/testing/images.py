"""Tiny checkpoints of models that read images, with tokenizer, chat template and image processor, and images drawn on the spot."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.data.media import Media
from miles_embedded.testing.families import family_checkpoint

#: Ids 60 to 63, as in ``families.FAMILIES``.
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = """{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}:{%- endif -%}"""
#: Images of at most 9 features, so that prompts fit in the tiny context.
_QWEN = {"size": {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}, "patch_size": 14, "merge_size": 2}
#: family -> (image processor's class, its arguments).
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLImageProcessor", _QWEN),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", _QWEN),
    "qwen3_vl_moe": (
        "Qwen2VLImageProcessor",
        {**_QWEN, "size": {"shortest_edge": 64 * 64, "longest_edge": 96 * 96}, "patch_size": 16},
    ),
    "qwen3_vl": (
        "Qwen2VLImageProcessor",
        {**_QWEN, "size": {"shortest_edge": 64 * 64, "longest_edge": 96 * 96}, "patch_size": 16},
    ),
}


def vision_tokenizer() -> Any:
    """Make a tokenizer with 64 ids: padding 0, end 1, one character per id, and from 60 the special tokens of images."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<end>", *(chr(ord(" ") + i) for i in range(58))]
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    made.chat_template = TEMPLATE
    return made


def vision_checkpoint(family: str, directory: str | Path, seed: int = 0) -> Path:
    """Save a tiny random checkpoint of a family of ``PROCESSORS`` with everything that a run with images needs."""
    path = family_checkpoint(family, directory, seed)
    vision_tokenizer().save_pretrained(path)
    kind, values = PROCESSORS[family]
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **values}))
    return path


def draw_image(seed: int, width: int = 60, height: int = 60) -> bytes:
    """Return a PNG with random pixels."""
    from PIL import Image

    pixels = np.random.RandomState(seed).randint(0, 255, (height, width, 3)).astype(np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def image(seed: int, width: int = 60, height: int = 60) -> Media:
    """Return a random image as media."""
    return Media.of("image", draw_image(seed, width, height))
