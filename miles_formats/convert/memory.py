"""Computes the bytes of a model's weights in BF16 and in a number format, by class of weight.

It uses a planned conversion (``encode.to_format``), that is, headers only and the same selectors as a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_formats.convert.conversion import Item

#: Class of a tensor -> pattern; the first pattern found in the name decides.
CLASSES: tuple[tuple[str, str], ...] = (
    ("routers", r"\.(gate|router)\.(weight|e_score_correction_bias|bias|classifier)"),
    ("norms", r"norm"),
    ("shared experts", r"shared_expert"),
    ("routed experts", r"\.experts\."),
    ("attention", r"attn|attention"),
    ("dense MLP", r"\.mlp\.|feed_forward"),
    ("embeddings", r"embed|wte"),
    ("lm_head", r"lm_head"),
)


@dataclass(frozen=True)
class Row:
    """Tensors of one class: their number, the number of quantised ones, and bytes in BF16 and in the format."""

    name: str
    tensors: int
    quantized: int
    bf16: int
    after: int


def memory_table(items: Iterable[Item]) -> list[Row]:
    """Return one row per class in the order of ``CLASSES``, then ``other`` and ``total``; empty classes are left out."""
    rows: dict[str, Row] = {name: Row(name, 0, 0, 0, 0) for name, _ in CLASSES} | {"other": Row("other", 0, 0, 0, 0)}
    for item in items:
        kind = next((name for name, pattern in CLASSES if re.search(pattern, item.name)), "other")
        bf16 = 2 * math.prod(item.shape)
        after = bf16 if item.reason else item.after
        for name in (kind, "total"):
            row = rows.setdefault(name, Row(name, 0, 0, 0, 0))
            quantized = row.quantized + (not item.reason)
            rows[name] = Row(name, row.tensors + 1, quantized, row.bf16 + bf16, row.after + after)
    return [row for row in rows.values() if row.tensors]
