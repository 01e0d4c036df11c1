"""The ``config.json`` of a checkpoint: read without importing Transformers, and checked for values that no model has.

Python's JSON reader accepts NaN, and for duplicate entries it keeps the last one. A model built from such a file would train with
wrong values, or planning would take minutes, so such values are rejected before anything is derived from them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles_core.errors import CheckpointError
from miles_core.text import load_strict_json

#: Maximum numbers of layers and experts of a configuration; larger numbers are typing errors and would slow down planning.
MOST_LAYERS, MOST_EXPERTS = 2_000, 20_000
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers",
           "num_mtp_modules", "mtp_num_layers", "depth", "encoder_layers", "decoder_layers")  # fmt: skip
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
#: Entries that must be finite numbers above 0, wherever they occur.
_POSITIVE = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")


def model_config(checkpoint: str | None) -> Mapping[str, Any] | None:
    """Read and check the ``config.json`` of a checkpoint. None without a checkpoint, and for a hub name that is not in the local cache.

    Args:
        checkpoint: a directory, or a hub name.

    Raises:
        CheckpointError: a path that does not exist, or a ``config.json`` that is missing, unreadable or has an impossible value.
    """
    if not checkpoint:
        return None
    directory = Path(checkpoint).expanduser()
    if not directory.is_dir():
        if checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") != 1:
            raise CheckpointError(f"--hf-checkpoint {checkpoint}: no such directory")
        cached = _find_cached(checkpoint)
        if cached is None:
            return None
        directory = cached
    path = directory / "config.json"
    try:
        config, problem = _read(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"--hf-checkpoint {checkpoint}: it holds no config.json, so it is not a Hugging Face checkpoint"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"--hf-checkpoint {checkpoint}: its config.json cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"--hf-checkpoint {checkpoint}: its config.json holds {type(config).__name__}, not an object"
        )
    if problem:
        raise CheckpointError(f"--hf-checkpoint {checkpoint}: in its config.json {problem}; correct the file")
    return config


@lru_cache(maxsize=8)
def _read(text: str) -> tuple[Any, str]:
    """Parse a ``config.json`` and find its problem. Cached, because each change that a refused plan tries needs both."""
    config = load_strict_json(text)
    return config, find_problem(config) if isinstance(config, dict) else ""


def find_problem(config: Mapping[str, Any]) -> str:
    """Return a description of the first impossible value, with its entry; empty if there is none.

    Checks for NaN, entries of ``_POSITIVE``, the numbers of layers and experts, and more experts per token than experts. Also checks
    nested configurations (``text_config``, ``vision_config``).
    """
    for path, key, value in _entries(config):
        if isinstance(value, float) and math.isnan(value):
            return f"{path} is NaN"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in _POSITIVE and value is not None and not (number and math.isfinite(value) and value > 0):
            return f"{path} is {value!r}, and must be a number above 0"
        for keys, most in ((_LAYERS, MOST_LAYERS), (EXPERTS, MOST_EXPERTS)):
            if key in keys and number and value > most:
                return f"{path} is {value!r}, more than the {most:,} that are supported"
    return next(filter(None, map(_find_excess_choice, [config, *_parts(config)])), "")


def _find_excess_choice(config: Mapping[str, Any]) -> str:
    """Check the number of experts per token. A configuration without experts may still have this entry."""
    key = next((k for k in EXPERTS_PER_TOKEN if config.get(k) is not None), "")
    of = next((k for k in EXPERTS if config.get(k) is not None), "")
    chosen, count = config.get(key), config.get(of)
    if type(chosen) is not int or type(count) is not int or count < 2 or 1 <= chosen <= count:
        return ""
    return f"{key} is {chosen} where {of} is {count}: a token can be routed to between 1 and {count} experts"


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [part for name, part in config.items() if name.endswith("_config") and isinstance(part, dict)]


def _entries(value: Any, path: str = "", key: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield path, key and value of every entry that is neither an object nor a list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _entries(inner, f"{path}.{name}" if path else str(name), str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _entries(inner, f"{path}[{index}]", key)
    else:
        yield path, key, value


def _find_cached(name: str) -> Path | None:
    """Return the local cache's snapshot of the hub repository ``name`` at ``main``; None if there is none."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    repository = cache / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = repository / "snapshots" / reference.read_text().strip()
    return snapshot if (snapshot / "config.json").exists() else None
