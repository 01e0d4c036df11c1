"""How far apart rounding may bring two sides that compute one function.

Each side declares its precision: the dtype of its model, and with a number format the format's relative error (``Format.error``), rounded
inputs of its products, and the type of cached keys and values. ``Side.rounding`` adds these errors up as independent ones, and the
limits are linear in the sum. The constants were chosen from ``benchmarks/planted_defects.py`` (result file
``benchmarks/results/planted_defects-2026-11-23.json``): every family, format and schedule of the tests stays below half of each limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miles_mismatch.agreement import STRETCH, Agreement

#: dtype -> relative error of a layer's output that is computed in it. FP32 sums in another order. BF16 rounds each result to 2^-9, about
#: ten of them per layer.
DTYPES = {"float32": 1e-5, "bfloat16": 7e-3}
#: Type of cached keys and values -> relative error (half a unit in the last place of 3 and of 2 stored bits, as a root mean square).
CACHES = {"": 0.0, "bfloat16": 2e-3, "float8_e4m3fn": 0.03, "float8_e5m2": 0.06}
#: Limits per unit of rounding, and what is allowed without any.
_MEDIAN, _STRETCH, _SLOPE = 12.0, 20.0, 1.5
_FLOOR, _SLOPE_FLOOR = 2e-3, 2e-3
#: What is left of the error of rounded inputs, keys and values where both sides round alike: results that differ in the last place of the
#: dtype tip some of them over to the next code.
_TIPPED = 0.5
#: Standard errors of the slope that count as chance.
_CHANCE = 4.0


@dataclass(frozen=True)
class Side:
    """What one side declares.

    Attributes:
        dtype: of the model's copy, a key of ``DTYPES``.
        format: its number format's name, ``bf16`` for none.
        error: that format's relative error, 0 for none.
        rounds_inputs: the format rounds the inputs of products too.
        cache: type of cached keys and values.
    """

    dtype: str
    format: str = "bf16"
    error: float = 0.0
    rounds_inputs: bool = False
    cache: str = ""

    def rounding(self, other: Side) -> float:
        """Relative error of a layer's output, compared with that of ``other``. Two sides in one format compute with the same codes of the
        weights."""
        inputs = self.error * self.rounds_inputs
        if self.format == other.format:
            weights, inputs = 0.0, _TIPPED * inputs
        else:
            weights = self.error
        cache = CACHES[self.cache] * (_TIPPED if self.cache == other.cache else 1.0)
        return math.hypot(DTYPES[self.dtype], weights, inputs, cache)

    def __str__(self) -> str:
        parts = [self.dtype, *([self.format] if self.error else []), *([f"{self.cache} cache"] if self.cache else [])]
        return ", ".join(parts)


@dataclass(frozen=True)
class Allowance:
    """The largest statistics of ``Agreement`` that rounding explains, in nats (the slope without a unit)."""

    median: float
    stretch: float
    slope: float

    def exceeded(self, found: Agreement) -> list[str]:
        """What exceeds its limit, each as a phrase with both numbers; empty when the sides agree."""
        if not found.finite:
            return ["some log-probabilities are not finite numbers"]
        phrases = []
        if found.median > self.median:
            phrases.append(
                f"half of the tokens differ by more than {found.median:.3g} nats ({self.median:.2g} allowed)"
            )
        if found.stretch > self.stretch:
            phrases.append(
                f"of the {STRETCH} tokens from position {found.position} on, half differ by more than {found.stretch:.3g} nats "
                f"({self.stretch:.2g} allowed)"
            )
        if abs(found.slope) > self.slope + _CHANCE * found.slope_error:
            phrases.append(
                f"the engine's log-probabilities are {1 + found.slope:.3f} times as far apart as the trainer's (within "
                f"{self.slope + _CHANCE * found.slope_error:.2g} of 1 allowed)"
            )
        return phrases


def allowance(engine: Side, trainer: Side) -> Allowance:
    """The limits for two sides."""
    total = math.hypot(engine.rounding(trainer), trainer.rounding(engine))
    return Allowance(_FLOOR + _MEDIAN * total, _FLOOR + _STRETCH * total, _SLOPE_FLOOR + _SLOPE * total)
