"""Tiny checkpoints of models that read images, with tokenizer, chat template and image processor, and images drawn on the spot."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.data.media import Media
from miles_embedded.testing.families import family_checkpoint

#: Chat template; ``MARK`` is what a family writes in the place of an image.
TEMPLATE = """{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}MARK{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}:{%- endif -%}"""


@dataclass(frozen=True)
class ImageFamily:
    """What a tiny checkpoint of a family needs besides its model.

    Attributes:
        kind: class of the image processor.
        images: its arguments. Images have few features, so that prompts fit in the tiny context.
        tokens: the special tokens with ids 60, 61, ...; the first is the placeholder of a feature.
        names: name -> token, for processors that look them up in the tokenizer.
        mark: text in the place of an image.
        processor: arguments of the processor.
    """

    kind: str
    images: dict[str, Any]
    tokens: tuple[str, ...]
    names: dict[str, str] = field(default_factory=dict)
    mark: str = "<image>"
    processor: dict[str, Any] = field(default_factory=dict)


def _qwen(patch: int) -> ImageFamily:
    size = {"shortest_edge": (4 * patch) ** 2, "longest_edge": (6 * patch) ** 2}
    return ImageFamily(
        "Qwen2VLImageProcessor",
        {"size": size, "patch_size": patch, "merge_size": 2},
        ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        mark="<|vision_start|><|image_pad|><|vision_end|>",
    )


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_PARTS = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
#: Families of ``families.FAMILIES`` that read images.
IMAGE_PARTS: dict[str, ImageFamily] = {
    "qwen2_vl": _qwen(14),
    "qwen2_5_vl": _qwen(14),
    "qwen3_vl": _qwen(16),
    "qwen3_vl_moe": _qwen(16),
    "qwen3_5": _qwen(16),
    "qwen3_5_moe": _qwen(16),
    "glm4v": ImageFamily(
        "Glm4vImageProcessor",
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 84 * 84 * 2}, "patch_size": 14, "merge_size": 2},
        ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
        mark="<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "gemma3": ImageFamily(
        "Gemma3ImageProcessor",
        {"size": _square(28)},
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        mark="<start_of_image>",
        processor={"image_seq_length": 4},
    ),
    "mistral3": ImageFamily(
        "PixtralImageProcessor",
        {"size": {"longest_edge": 84}, "patch_size": 14},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        mark="[IMG]",
        processor={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "internvl": ImageFamily(
        "GotOcr2ImageProcessor",
        {"size": _square(28), "max_patches": 2},
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        {
            **{"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"},
            "video_token": "<video>",
        },
        mark="<IMG_CONTEXT>",
        processor={"image_seq_length": 4},
    ),
    "llava": ImageFamily(
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": _square(28)},
        ("<image>",),
        processor=_LLAVA,
    ),
    "llava_next": ImageFamily(
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": _square(28), **_PARTS},
        ("<image>",),
        processor=_LLAVA,
    ),
}


def vision_tokenizer(family: str) -> Any:
    """Make a tokenizer with at most 64 ids: padding 0, end 1, one character per id, and from 60 the special tokens of images."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    parts = IMAGE_PARTS[family]
    symbols = ["<pad>", "<end>", *(chr(ord(" ") + i) for i in range(58))]
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(parts.tokens))
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=parts.names or list(parts.tokens),
    )
    made.chat_template = TEMPLATE.replace("MARK", parts.mark)
    return made


def vision_checkpoint(family: str, directory: str | Path, seed: int = 0) -> Path:
    """Save a tiny random checkpoint of a family of ``IMAGE_PARTS`` with everything that a run with images needs."""
    path, parts = family_checkpoint(family, directory, seed), IMAGE_PARTS[family]
    vision_tokenizer(family).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": parts.kind, **parts.images}))
    if parts.processor:
        (path / "processor_config.json").write_text(json.dumps(parts.processor))
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
