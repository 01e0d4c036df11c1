"""Limits on the differences that rounding can cause between two sides that compute the same function.

Each side declares its precision: the dtype of its model, and with a number format the format's relative error (``Format.error``),
whether it rounds inputs of products, and the dtype of cached keys and values. ``Side.rounding`` combines these errors as independent
ones, and the limits are linear in the result. The constants were chosen from ``benchmarks/planted_defects.py`` (result file
``benchmarks/results/planted_defects-2026-11-24.json``): every family, format and schedule of the tests stays below half of each limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miles_mismatch.agreement import STRETCH, Agreement

#: dtype -> relative error of the output of a layer. In FP32 it comes from another order of summation; BF16 rounds each of about ten results
#: per layer to 2^-9, FP16 to 2^-12.
DTYPES = {"float32": 1e-5, "float16": 9e-4, "bfloat16": 7e-3}
#: Dtype of cached keys and values -> relative error (root mean square of half a unit in the last place, for 3 and 2 mantissa bits).
CACHES = {"": 0.0, "bfloat16": 2e-3, "float8_e4m3fn": 0.03, "float8_e5m2": 0.06}
#: Limits per unit of rounding, and constant terms.
_MEDIAN, _STRETCH, _SLOPE = 12.0, 20.0, 1.5
_FLOOR, _SLOPE_FLOOR = 2e-3, 2e-3
#: Fraction of the error of rounded inputs, keys and values that remains if both sides round in the same way: differences in the last place
#: of the dtype move some values to the next code.
_TIPPED = 0.5
#: Deviations of the slope within this number of standard errors count as chance.
_CHANCE = 4.0


@dataclass(frozen=True)
class Side:
    """Declared precision of one side.

    Attributes:
        dtype: dtype of the model copy, a key of ``DTYPES``.
        format: name of the number format, ``bf16`` for none.
        error: relative error of the format, 0 for none.
        rounds_inputs: whether the format also rounds the inputs of products.
        cache: dtype of cached keys and values, a key of ``CACHES``.
    """

    dtype: str
    format: str = "bf16"
    error: float = 0.0
    rounds_inputs: bool = False
    cache: str = ""

    def estimate_error(self, other: Side) -> float:
        """Return the relative error of a layer's output compared with ``other``. Two sides with the same format have the same weight
        codes, so their weights contribute no error."""
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

    def find_exceeded(self, found: Agreement) -> list[str]:
        """Describe each statistic that exceeds its limit, with both numbers; [] if the sides agree."""
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
    """Compute the limits for two sides."""
    total = math.hypot(engine.estimate_error(trainer), trainer.estimate_error(engine))
    return Allowance(_FLOOR + _MEDIAN * total, _FLOOR + _STRETCH * total, _SLOPE_FLOOR + _SLOPE * total)
