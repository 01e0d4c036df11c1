"""Emulation of a KV cache dtype by rounding keys and values wherever they are attended to."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.errors import ConfigError

#: Key in ``Context.attached``: dtype to which keys and values are rounded.
KV_DTYPE = "kv_dtype"
#: Supported cache dtype -> largest finite value, at which values saturate; None without saturation.
KV_DTYPES = {"bfloat16": None, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def check_kv_dtype(dtype: str) -> str:
    """Return ``dtype``; ConfigError if it is not a supported cache dtype. "" is the model's own dtype."""
    if dtype and dtype not in KV_DTYPES:
        raise ConfigError(f"key/value cache dtype {dtype!r} must be one of {', '.join(KV_DTYPES)}")
    return dtype


def round_to_cache(x: Tensor, dtype: str) -> Tensor:
    """Round ``x`` to a cache of this dtype (without scale); returns it in its own dtype."""
    limit = KV_DTYPES[dtype]
    if limit is not None:
        x = x.clamp(-limit, limit)
    return x.to(getattr(torch, dtype)).to(x.dtype)
