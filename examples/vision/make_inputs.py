"""Makes a small vision model and a task for it: how many circles does a picture show?

    python examples/vision/make_inputs.py DIRECTORY [--seed N]

A picture of 48 x 48 pixels has up to eight shapes in a grid of 3 x 3 fields, circles and squares in random colors, sizes and places. The
model has the architecture of Qwen2.5-VL and 0.3 M random parameters: a tower of two layers, whose patches of 16 x 16 pixels become nine
features, and a language model of two layers. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

#: Ids 60 to 63.
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
IDS = dict(
    zip(
        ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), range(60, 64), strict=True
    )
)
TEMPLATE = """{%- for message in messages -%}{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}={%- endif -%}"""
TEXT = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "initializer_range": 0.1,
}
TOWER = {
    **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8},
    **{"window_size": 48, "fullatt_block_indexes": [0, 1], "initializer_range": 0.1},
}
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "size": {"shortest_edge": 2304, "longest_edge": 2304},
}


def draw(rng: random.Random) -> tuple[Any, int]:
    """Draw one picture; returns it and the number of its circles."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (48, 48), tuple(rng.randint(0, 60) for _ in range(3)))
    pen, circles = ImageDraw.Draw(picture), rng.randint(0, 5)
    kinds = ["circle"] * circles + ["square"] * rng.randint(0, min(3, 9 - circles))
    for field, kind in zip(rng.sample(range(9), len(kinds)), kinds, strict=True):
        size = rng.randint(9, 13)
        left = 16 * (field % 3) + rng.randint(1, 15 - size)
        top = 16 * (field // 3) + rng.randint(1, 15 - size)
        color = tuple(rng.randint(130, 255) for _ in range(3))
        (pen.ellipse if kind == "circle" else pen.rectangle)((left, top, left + size - 1, top + size - 1), fill=color)
    return picture, circles


def write_rows(directory: Path, name: str, count: int, seed: str, careless: float = 0.0) -> None:
    """Write ``count`` pictures and the file ``NAME.jsonl`` with their questions and answers. The answers of demonstrations come from a teacher who
    misses a circle with probability ``careless``."""
    rng, rows = random.Random(seed), []
    (directory / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        picture, circles = draw(rng)
        file = f"{name}/{number:05d}.png"
        picture.save(directory / file)
        content = [{"type": "image", "image": file}, {"type": "text", "text": "CIRCLES"}]
        shown = circles - (circles > 0 and rng.random() < careless)
        rows.append({"prompt": [{"role": "user", "content": content}], "label": str(circles), "response": str(shown)})
    (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(directory: Path, seed: int) -> int:
    """Write the checkpoint with tokenizer and image processor; returns the number of parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    symbols = ["<pad>", "<end>", *(chr(ord(" ") + i) for i in range(58))]
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", extra_special_tokens=list(SPECIAL)
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=TEXT, vision_config=TOWER, tie_word_embeddings=False, **IDS)
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGES), encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, count, careless in (("demonstrations", 1500, 0.5), ("train", 4000, 0.0), ("held_out", 200, 0.0)):
        write_rows(options.directory, name, count, f"{name} {options.seed}", careless)
    count = write_model(options.directory / "model", options.seed)
    print(f"{options.directory}: a model of {count:,} parameters, 1,500 demonstrations, 4,000 questions, 200 held out")


if __name__ == "__main__":
    main()
