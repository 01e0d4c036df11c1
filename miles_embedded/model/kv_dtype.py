"""The type in which a cache keeps keys and values, imitated by rounding them wherever they are attended to."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.errors import ConfigError

#: Key in ``Context.attached``: keys and values are rounded to this type wherever they are attended to.
KV_DTYPE = "kv_dtype"
#: What a cache can keep them in, and the largest value it can hold (beyond it, they saturate).
KV_DTYPES = {"bfloat16": None, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def check_kv_dtype(dtype: str) -> str:
    """``dtype``, or ConfigError when no cache keeps keys and values so; "" is the model's own."""
    if dtype and dtype not in KV_DTYPES:
        raise ConfigError(f"key/value cache dtype {dtype!r} is none of {', '.join(KV_DTYPES)}")
    return dtype


def as_cached(x: Tensor, dtype: str) -> Tensor:
    """``x`` rounded to what a cache of this type would hold (no scale), in its own dtype."""
    limit = KV_DTYPES[dtype]
    if limit is not None:
        x = x.clamp(-limit, limit)
    return x.to(getattr(torch, dtype)).to(x.dtype)
