"""Statistics of the tokens that each expert receives, and the file with which the report plots them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def summarise(loads: Sequence[Tensor]) -> dict[str, float]:
    """Return the metrics of one optimizer step; empty if no token was counted.

    Args:
        loads: [experts] tokens of each expert by layer.

    Returns:
        ``expert_entropy``: entropy of the load divided by its maximum, log(experts), mean of the layers; ``experts_unused``: experts
        without a token, sum over layers.
    """
    counted = [load for load in loads if load.any()]
    if not counted:
        return {}
    shares = [load / load.sum() for load in counted]
    entropy = [float(torch.special.entr(share).sum()) / math.log(len(share)) for share in shares if len(share) > 1]
    return {
        "expert_entropy": sum(entropy) / len(entropy) if entropy else 1.0,
        "experts_unused": float(sum(int((load == 0).sum()) for load in counted)),
    }


def write_loads(file: Path, totals: Sequence[Tensor]) -> None:
    """Write each expert's load relative to the mean of its layer, as a grid of the report. Layers without a token are left out."""
    counted = [(layer, load) for layer, load in enumerate(totals) if load.any()]
    widest = max((len(load) for _, load in counted), default=0)
    values = [
        [*(round(float(v), 4) for v in load / load.mean()), *[None] * (widest - len(load))] for _, load in counted
    ]
    grid = {
        "rows": "layer with experts",
        "columns": "expert",
        "names": [layer for layer, _ in counted],
        "values": values,
    }
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(grid))
    os.replace(partial, file)
