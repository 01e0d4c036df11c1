"""The JSON and other files of a checkpoint besides its weights: quantisation configurations, and files that are copied."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miles_core.checkpoint.hf_files import CONFIG, INDEX
from miles_core.precision.format import Format
from miles_formats.selector import tower

#: Keys of config.json, at its top or in a part such as ``text_config``, that describe quantised weights.
_KEYS = ("quantization_config", "compression_config")
#: The file that NVIDIA's ModelOpt writes next to config.json.
_SIDE_FILE = "hf_quant_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".part")


def quantization_block(directory: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantisation configuration of a checkpoint; None if it has none."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    block = next((part[key] for part in parts for key in _KEYS if isinstance(part.get(key), Mapping)), None)
    if block is not None:
        return dict(block)
    side = directory / _SIDE_FILE
    if not side.is_file():
        return None
    said = json.loads(side.read_text(encoding="utf-8"))
    return {"quant_method": said.get("producer", {}).get("name", "unnamed"), **said.get("quantization", {})}


def quantized_files(config: Mapping[str, Any], format: Format, unquantized: list[str]) -> dict[str, str]:
    """Name -> text of the JSON files of a quantised checkpoint, config.json last."""
    extra = {name: dump(content) for name, content in format.files(unquantized).items()}
    return {**extra, CONFIG: dump({**config, "quantization_config": format.config(unquantized)})}


def plain_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Return config.json for a checkpoint that was converted back to BF16."""
    return {CONFIG: dump(plain_config(config))}


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` without quantisation entries, with dtype BF16."""

    def clean(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        kept = {k: clean(v) for k, v in part.items() if k not in _KEYS}
        return kept | {k: "bfloat16" for k in ("dtype", "torch_dtype") if isinstance(kept.get(k), str)}

    made: dict[str, Any] = clean(config)
    return made if {"dtype", "torch_dtype"} & set(made) else made | {"dtype": "bfloat16"}


def other_files(directory: Path, without: Iterable[str] = ()) -> dict[str, Path]:
    """Return relative name -> file of all files that are copied unchanged: tokenizer, templates, generation settings, remote code, licence.
    Omits hidden files, weights in any format, and files that the conversion writes."""
    left = {CONFIG, INDEX, _SIDE_FILE, *without}
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        hidden = any(part.startswith(".") for part in name.parts)
        weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not hidden and not weights and str(name) not in left:
            found[str(name)] = path
    return found


def unquantized_modules(shapes: Mapping[str, tuple[int, ...]], quantized: Iterable[str]) -> list[str]:
    """Return the linear modules that keep their precision, which an engine must know. These are all matrices of the checkpoint that are
    neither quantised nor embeddings, and ``lm_head``, which is not in the checkpoint if it is tied. If no expert of a layer is quantised,
    the module of all its experts is included, because engines hold them in one module. Towers of other modalities are included, because
    engines use different paths for them and join matrices in them."""
    chosen = set(quantized)
    left: dict[str, None] = {}
    experts: dict[str, bool] = {}  # module of all experts of a layer -> whether none of them is quantised
    for name, shape in shapes.items():
        joined = len(shape) > 2 and "experts" in name
        if ".experts." in name:
            module = name[: name.index(".experts.")] + ".experts"
            experts[module] = experts.get(module, True) and name not in chosen
        if name not in chosen and "embed" not in name and (joined or (len(shape) == 2 and name.endswith(".weight"))):
            left[name.removesuffix(".weight")] = None
    left |= dict.fromkeys(found for name in shapes if (found := tower(name)) is not None)
    left |= dict.fromkeys(module for module, plain in experts.items() if plain)
    return list(left) if any(name.endswith("lm_head") for name in left) else [*left, "lm_head"]


def dump(content: Mapping[str, Any]) -> str:
    """Format JSON as Transformers does."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
