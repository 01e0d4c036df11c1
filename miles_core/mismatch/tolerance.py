"""Declared limits on the differences that rounding can cause between two sides that compute the same function.

Each side declares its precision: the dtype of its model, and with a number format the format's relative error (``Format.error``),
whether it rounds inputs of products, and the dtype of cached keys and values. ``Side.estimate_error`` combines these errors as independent
ones, and the differences are linear in the result. ``benchmarks/mismatch/planted_defects.py`` measures the constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: The engine's errors may be this many times as large as the trainer's own.
RATIO = 1.25
#: Errors and slopes below this size (nats) are ignored; the size is larger for formats that round inputs.
FLOOR = 1e-3
#: Bound of the mean difference of sampled tokens, relative to the mean that the declared precisions explain: few tokens of a step are
#: compared, and some of them change experts.
_FACTOR = 1.5
#: dtype -> relative error of the output of a layer. In FP32 it comes from another order of summation; BF16 rounds each of about ten results
#: per layer to 2^-9, FP16 to 2^-12.
DTYPES = {"float32": 1e-5, "float16": 9e-4, "bfloat16": 7e-3}
#: Dtype of cached keys and values -> relative error (root mean square of half a unit in the last place, for 3 and 2 mantissa bits).
CACHES = {"": 0.0, "bfloat16": 2e-3, "float8_e4m3fn": 0.03, "float8_e5m2": 0.06}
#: Scale of the errors of log-probabilities, per unit of rounding. It depends on the weights, too: this one holds for random models of two
#: layers. Core compares with the trainer's own errors wherever the trainer can measure them (``first_sync``).
_SCALE = 4.0
#: Fraction of the error of rounded inputs, keys and values that remains if both sides round in the same way: differences in the last place
#: of the dtype move some values to the next code.
_TIPPED = 0.5


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

    @property
    def tipped(self) -> float:
        """Relative error that remains of rounded inputs, keys and values if another side rounds them in the same way."""
        return _TIPPED * math.hypot(self.error * self.rounds_inputs, CACHES[self.cache])

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


def find_dtype(fact: Callable[[str], Any]) -> str:
    """Return the dtype in which both sides hold the model; the lower precision if this process cannot determine it.

    Args:
        fact: returns the value of a fact of the run, None if it is unknown.
    """
    dtype = str(fact("model.dtype") or "auto")
    if dtype != "auto":
        return dtype
    here = fact("runtime") == "inline" and fact("gpu.count") == 0
    return "float32" if fact("model.device") == "cpu" or here else "bfloat16"


def expected_scale(engine: Side, trainer: Side) -> float:
    """Return the scale of the differences of log-probabilities, in nats, of two sides that compute the same function
    (``agreement.expected_errors``)."""
    return _SCALE * math.hypot(engine.estimate_error(trainer), trainer.estimate_error(engine))


def first_step_bound(engine: Side, trainer: Side) -> float:
    """Return the bound of the mean of the absolute differences of the samples of a first step (``first_steps``), in nats."""
    mean = FLOOR + RATIO * expected_scale(engine, trainer) * math.sqrt(2)  # the largest that rounding explains
    return _FACTOR * mean
