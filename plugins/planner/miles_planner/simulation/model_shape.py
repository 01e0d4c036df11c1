"""The sizes of a model that its speed depends on, from Hugging Face's ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError
from miles_planner.model_cost import model_cost

#: Bytes of a BF16 number.
_BF16 = 2


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        layers: number of layers.
        parameters: all parameters, without the input embedding (which a token reads one row of).
        expert_parameters: those of routed experts; 0 for a dense model.
        active_share: fraction of the routed experts that a token uses.
        kv_bytes: bytes that one token keeps in the cache, all layers, BF16.
        attention_width: heads times head size, all layers that attend: a token's attention over n tokens takes 4 n times this many operations.
    """

    layers: int
    parameters: float
    expert_parameters: float
    active_share: float
    kv_bytes: float
    attention_width: float

    @property
    def active(self) -> float:
        """Parameters that a token is multiplied with."""
        return self.parameters - self.expert_parameters * (1 - self.active_share)


def read_shape(path: Path | str) -> ModelShape:
    """Read ``config.json`` (the file, or the directory with it).

    Raises:
        ConfigError: it cannot be read, or lacks a size.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model-config {path}: it cannot be read ({error}); give a model's config.json, or its directory"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--model-config {path}: it holds {type(raw).__name__}; give a model's config.json")
    try:
        return shape_of(raw)
    except ValueError as error:
        raise ConfigError(
            f"--model-config {path}: {error}; give the model's numbers with --parameters, --kv-bytes-per-token and --layers"
        ) from error


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Compute the sizes of a configuration; ValueError if it does not determine them."""
    cost = model_cost(config)
    if cost is None:
        raise ValueError(
            "hidden_size, num_hidden_layers, vocab_size or num_attention_heads is missing or not a positive number"
        )
    size = cost.size
    separate = size.embeddings - size.vocab * size.hidden  # 0 if the output layer is the embedding
    return ModelShape(
        size.layers,
        size.parameters - separate,
        size.experts,
        cost.top_k / cost.experts if cost.experts else 1.0,
        _BF16 * size.cached,
        size.attending * cost.attended / 2,
    )
