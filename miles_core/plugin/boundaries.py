"""Sequence lengths in tokens beyond which a model computes differently, from its ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

#: Keys with such a length.
_BOUNDARY = re.compile(
    r"sliding_window|window_size|chunk_size|original_max_position_embeddings|floor_scale|index_topk|index_block_size|"
    r"initial_context_length|max_window$"
)
#: Types of rotary embeddings whose frequencies change beyond ``max_position_embeddings``.
_GROWING = ("dynamic",)
_OTHER_MODALITIES = ("vision_config", "audio_config")


def boundaries(config: Mapping[str, Any]) -> dict[str, int]:
    """Return key -> length for sliding windows, attention chunks, the original length of a rotary embedding, the position at which
    attention temperature scaling starts, and the number of keys that sparse attention selects.

    If a key occurs several times, returns its largest value.
    """
    lengths: dict[str, int] = {}
    growing = False
    for name, value in entries(config):
        if _BOUNDARY.search(name) and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            lengths[name] = max(lengths.get(name, 0), value)
        growing |= name in ("rope_type", "type") and value in _GROWING
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    if growing and (longest := text.get("max_position_embeddings")):
        lengths["max_position_embeddings"] = int(longest)
    return lengths


def entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all keys and values of a configuration and its nested configurations, except those of other modalities."""
    for name, value in config.items():
        yield str(name), value  # class labels have integer keys
        if isinstance(value, Mapping) and name not in _OTHER_MODALITIES:
            yield from entries(value)
