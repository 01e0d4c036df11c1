"""The reward of the recipes with numbers as answers."""

from __future__ import annotations

import re
from typing import Any


async def reward(args: Any, sample: Any) -> dict[str, float]:
    """Return 1 for the right number as the last one of the answer, 0.1 for any number."""
    answer = str(sample.metadata.get("answer", sample.response)).replace(",", "")
    numbers = re.findall(r"-?\d+", answer)
    right = bool(numbers) and numbers[-1] == sample.label
    return {"score": 1.0 if right else 0.1 if numbers else 0.0, "right": float(right)}
