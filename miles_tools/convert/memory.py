"""How many bytes a model's weights take in BF16 and in a number format, by what they are.

Computed from a planned conversion (``encode_files.plan``), so from headers alone and with the same selectors as a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_tools.convert.conversion import Item

#: What a tensor is, by the first pattern found in its name.
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
    """Tensors of one class: how many, of them quantised, bytes in BF16 and in the format."""

    name: str
    tensors: int
    quantized: int
    bf16: int
    after: int


def memory_table(items: Iterable[Item]) -> list[Row]:
    """A row a class in the order of ``CLASSES``, then ``other``, then ``total``; empty classes are left out."""
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
