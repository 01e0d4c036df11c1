"""The reward of GSM8K: its published answers end with ``#### NUMBER``."""

from __future__ import annotations

import re
from typing import Any


async def reward(args: Any, sample: Any) -> float:
    """Return 1 if the last number of the response is the number of the label, else 0."""
    right = float(sample.label.rpartition("####")[2].replace(",", ""))
    numbers = re.findall(r"-?\d+(?:\.\d+)?", sample.response.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == right)
