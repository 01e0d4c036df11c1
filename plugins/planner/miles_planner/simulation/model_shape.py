"""The sizes of a model that its speed depends on, from Hugging Face's ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError

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
        attention_width: heads times head size, all layers: a token's attention over n tokens takes 4 n times this many operations.
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
    text = raw.get("text_config")
    try:
        return shape_of(text if isinstance(text, dict) else raw)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"--model-config {path}: the size {error} is missing or not a positive number; give the model's numbers with --parameters, "
            "--kv-bytes-per-token and --layers"
        ) from error


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Compute the sizes of a configuration; KeyError names what is missing."""
    width, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    attention, cached, heads_width = _attention(config, width)
    dense = 3 * width * int(config["intermediate_size"])
    experts = int(_first(config, "n_routed_experts", "num_experts", "num_local_experts") or 0)
    one = 3 * width * int(_first(config, "moe_intermediate_size", "intermediate_size"))
    top = int(config["num_experts_per_tok"]) if experts else 0
    shared = 3 * width * int(_first(config, "shared_expert_intermediate_size") or 0)
    shared = shared or one * int(_first(config, "n_shared_experts") or 0)
    sparse = layers - min(layers, int(_first(config, "first_k_dense_replace") or 0)) if experts else 0
    routed = sparse * experts * one
    head = width * int(config["vocab_size"])
    rest = layers * attention + (layers - sparse) * dense + sparse * (shared + width * experts) + head
    if min(width, layers, heads_width) <= 0:
        raise ValueError("hidden_size or num_hidden_layers")
    return ModelShape(
        layers, float(rest + routed), float(routed), top / experts if experts else 1.0, layers * cached, layers * heads_width
    )  # fmt: skip


def _attention(config: Mapping[str, Any], width: int) -> tuple[int, float, int]:
    """Return one layer's parameters of attention, its cached bytes per token, and heads times head size."""
    heads = int(config["num_attention_heads"])
    if rank := config.get("kv_lora_rank"):  # multi-head latent attention, arXiv 2405.04434 section 2.1
        rope, nope, value = (int(config[name]) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        query = heads * (nope + rope)
        low = config.get("q_lora_rank")
        queries = (width + query) * int(low) if low else width * query
        keys = width * (rank + rope) + rank * heads * (nope + value)
        return queries + keys + heads * value * width, _BF16 * (rank + rope), heads * (nope + rope + value) // 2
    size = int(config.get("head_dim") or width // heads)
    kv = int(config.get("num_key_value_heads") or heads)
    return 2 * width * size * (heads + kv), _BF16 * 2 * kv * size, heads * size


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """Return the first entry that exists and is not None."""
    return next((config[name] for name in names if config.get(name) is not None), None)
