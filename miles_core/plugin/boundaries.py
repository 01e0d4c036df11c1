"""Lengths in tokens at which a model begins to compute something else, from its ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

#: Keys that hold such a length.
_BOUNDARY = re.compile(
    r"sliding_window|window_size|chunk_size|original_max_position_embeddings|floor_scale|index_topk|index_block_size|"
    r"initial_context_length|max_window$"
)
#: Types of rotary embeddings whose frequencies change beyond ``max_position_embeddings``.
_GROWING = ("dynamic",)
_OTHER_MODALITIES = ("vision_config", "audio_config")


def boundaries(config: Mapping[str, Any]) -> dict[str, int]:
    """Key -> length: sliding windows, attention chunks, the original length of a rotary embedding, the row at which a temperature starts,
    the keys that sparse attention keeps. Of two values of one key the larger one."""
    found: dict[str, int] = {}
    growing = False
    for name, value in entries(config):
        if _BOUNDARY.search(name) and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            found[name] = max(found.get(name, 0), value)
        growing |= name in ("rope_type", "type") and value in _GROWING
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    if growing and (longest := text.get("max_position_embeddings")):
        found["max_position_embeddings"] = int(longest)
    return found


def entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key of a configuration and of those inside of it, the towers of other modalities aside."""
    for name, value in config.items():
        yield str(name), value  # labels of classes are numbered
        if isinstance(value, Mapping) and name not in _OTHER_MODALITIES:
            yield from entries(value)
