"""Describe a checkpoint directory from its JSON files and safetensors headers, without loading weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_core.checkpoint.hf_files import CheckpointFiles, read_json

#: Bytes per parameter in an unsharded trainer: model copy, gradient, FP32 master copy (BF16 only), and both AdamW moments.
TRAINING_BYTES = {"float32": 4 + 4 + 8, "bfloat16": 2 + 4 + 4 + 8}
_ROUTER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?(?:gate|router)\.(?:(?:classifier|layer|proj|wg)\.)?weight$")
_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\..*\.experts\.")


@dataclass(frozen=True)
class ModelInfo:
    """A summary of one checkpoint.

    Attributes:
        directory: the checkpoint directory.
        config: the contents of ``config.json``.
        parameters: total number of weight elements.
        active: number of weight elements used per token; less than ``parameters`` only for mixture-of-experts models.
        dtypes: safetensors dtype -> number of elements.
        nbytes: total size of the weight files, in bytes.
        routers: number of decoder layers with a router, recognised by weight name.
        expert_layers: number of decoder layers with expert weights.
        context: maximum sequence length in tokens; 0 if the configuration does not state it.
        tokenizer: name of the tokenizer file; empty if there is none.
        chat_template: whether the checkpoint has a chat template.
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
        """Bytes of weights, gradients and optimiser state by dtype of the model copy, without activations and KV cache."""
        return {dtype: self.parameters * size for dtype, size in TRAINING_BYTES.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and ``training_bytes`` as JSON data, without ``config``."""
        content = {**asdict(self), "training_bytes": self.training_bytes}
        del content["config"]
        return content


def inspect_model(directory: Path | str) -> ModelInfo:
    """Summarise a Hugging Face checkpoint directory.

    Raises:
        CheckpointError: see ``CheckpointFiles``.
    """
    files = CheckpointFiles(directory, "--model")
    directory, config = files.directory, files.config
    inner = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    counts = {name: math.prod(entry.shape) for name, entry in files.entries.items()}
    total = sum(counts.values())
    expert = sum(count for name, count in counts.items() if _EXPERTS.search(name))
    dtypes: Counter[str] = Counter()
    for name, count in counts.items():
        dtypes[files.entries[name].code] += count
    experts = next((inner[k] for k in ("num_experts", "n_routed_experts", "num_local_experts") if inner.get(k)), 0)
    used = next((inner[k] for k in ("num_experts_per_tok", "num_experts_per_token") if inner.get(k)), experts)
    tokenizer = next((f for f in ("tokenizer.json", "tokenizer.model", "vocab.json") if (directory / f).is_file()), "")
    return ModelInfo(
        directory=str(directory),
        config=config,
        parameters=total,
        active=total - expert + (expert * int(used) // int(experts) if experts else expert),
        dtypes=dict(dtypes),
        nbytes=sum(file.stat().st_size for file in files.files),
        routers=len({m[1] for name in counts if (m := _ROUTER.search(name))}),
        expert_layers=len({m[1] for name in counts if (m := _EXPERTS.search(name))}),
        context=int(inner.get("max_position_embeddings") or 0),
        tokenizer=tokenizer,
        chat_template=_has_chat_template(directory),
    )


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    settings = directory / "tokenizer_config.json"
    return settings.is_file() and bool(read_json(settings).get("chat_template"))
