"""What a checkpoint directory holds, read from its JSON files and safetensors headers without loading a weight."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import CheckpointError

#: Bytes a parameter costs a trainer that shards nothing: model copy, gradient, FP32 master of a copy in BF16, AdamW's moments.
TRAINING_BYTES = {"float32": 4 + 4 + 8, "bfloat16": 2 + 4 + 4 + 8}
_HEADER_LIMIT = 100 << 20  # what the safetensors format allows
_ROUTER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?(?:gate|router)\.(?:weight|classifier\.weight)$")
_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\..*\.experts\.")


@dataclass(frozen=True)
class ModelInfo:
    """One checkpoint.

    Attributes:
        directory: where it is.
        config: its ``config.json``.
        parameters: stored elements of all weights.
        active: those used for one token, when experts are chosen per token; else ``parameters``.
        dtypes: safetensors dtype -> elements.
        nbytes: size of the weights.
        routers: decoder layers with a router, found by the weight's name.
        expert_layers: decoder layers with expert weights.
        context: longest sequence the configuration allows; 0 when it does not say.
        tokenizer: the tokenizer's file, empty without one.
        chat_template: whether prompts can be rendered from chat messages.
    """

    directory: str
    config: dict[str, Any]
    parameters: int
    active: int
    dtypes: dict[str, int]
    nbytes: int
    routers: int
    expert_layers: int
    context: int
    tokenizer: str
    chat_template: bool

    @property
    def training_bytes(self) -> dict[str, int]:
        """dtype of the model copy -> bytes of weights, gradients and optimiser; activations, KV cache not included."""
        return {dtype: self.parameters * each for dtype, each in TRAINING_BYTES.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the configuration."""
        content = {**asdict(self), "training_bytes": self.training_bytes}
        del content["config"]
        return content


def inspect_model(directory: Path | str) -> ModelInfo:
    """Look at a Hugging Face checkpoint directory.

    Raises CheckpointError naming the file: no ``config.json``, no safetensors weights, a listed file that is missing, a
    header that is damaged, or a file shorter than its header says.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"--model {directory}: no such directory")
    config = _load(directory / "config.json")
    inner = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    tensors = [tensor for file in _weight_files(directory) for tensor in read_header(file)]
    total = sum(count for _, _, count in tensors)
    expert = sum(count for name, _, count in tensors if _EXPERTS.search(name))
    dtypes: Counter[str] = Counter()
    for _, dtype, count in tensors:
        dtypes[dtype] += count
    experts = next((inner[k] for k in ("num_experts", "n_routed_experts", "num_local_experts") if inner.get(k)), 0)
    used = next((inner[k] for k in ("num_experts_per_tok", "num_experts_per_token") if inner.get(k)), experts)
    tokenizer = next((f for f in ("tokenizer.json", "tokenizer.model", "vocab.json") if (directory / f).is_file()), "")
    return ModelInfo(
        directory=str(directory),
        config=config,
        parameters=total,
        active=total - expert + (expert * int(used) // int(experts) if experts else expert),
        dtypes=dict(dtypes),
        nbytes=sum(file.stat().st_size for file in _weight_files(directory)),
        routers=len({m[1] for name, _, _ in tensors if (m := _ROUTER.search(name))}),
        expert_layers=len({m[1] for name, _, _ in tensors if (m := _EXPERTS.search(name))}),
        context=int(inner.get("max_position_embeddings") or 0),
        tokenizer=tokenizer,
        chat_template=_has_chat_template(directory),
    )


def read_header(file: Path) -> Iterator[tuple[str, str, int]]:
    """(name, dtype, elements) of every tensor of a safetensors file; raises CheckpointError for a damaged one."""
    with file.open("rb") as source:
        start = source.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 0 < length <= _HEADER_LIMIT:
            raise CheckpointError(f"{file} is not a safetensors file, or it is truncated; copy it again")
        try:
            header = json.loads(source.read(length))
            entries = [(k, v["dtype"], math.prod(v["shape"]), v["data_offsets"][1]) for k, v in _tensors(header)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: its header is damaged ({error}); copy it again") from error
    needed = 8 + length + max((end for *_, end in entries), default=0)
    if file.stat().st_size < needed:
        raise CheckpointError(f"{file} is truncated: {file.stat().st_size:,} of {needed:,} bytes; copy it again")
    for name, dtype, count, _ in entries:
        yield name, dtype, count


def _tensors(header: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        listed = sorted(set(_load(index).get("weight_map", {}).values()))
        missing = [name for name in listed if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{directory}: {len(missing)} of {len(listed)} weight files are missing: {missing[0]}"
            )
        return [directory / name for name in listed]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no *.safetensors weights; other formats are not read")
    return files


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    settings = directory / "tokenizer_config.json"
    return settings.is_file() and bool(_load(settings).get("chat_template"))


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no {path.name}, so it is not a Hugging Face checkpoint")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})") from error
