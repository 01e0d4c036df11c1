"""Compiles and loads the C files of this package."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from miles_formats.native import Native

_size, _pointer, _int = c_int64, c_void_p, c_int


class Slab(ctypes.Structure):
    """Keys and values of one cache store at one layer; mirrors the struct in ``attention.c``."""

    _fields_ = (("k", c_void_p), ("v", c_void_p), ("k_capacity", c_int64), ("v_capacity", c_int64))


#: C files and the argument types of their functions.
NATIVE = Native(
    Path(__file__).parent,
    ("steps.c", "attention.c", "experts.c"),
    {
        "rms_norm": [*[_pointer] * 4, *[_size] * 2, c_float, _int],
        "rms_norm_backward": [*[_pointer] * 7, *[_size] * 3, _int],
        "rotate": [*[_pointer] * 4, *[_size] * 3, _int, _int],
        "sort_choices": [*[_pointer] * 6, *[_size] * 3],
        "log_probs": [*[_pointer] * 4, *[_size] * 2, _int],
        "log_probs_backward": [*[_pointer] * 5, *[_size] * 2, _int],
        "gather_sum": [*[_pointer] * 4, *[_size] * 3, _int],
        "experts": [*[_pointer] * 7, *[_size] * 3, _int],
        "experts_backward": [*[_pointer] * 11, *[_size] * 3, _int],
        "tree_attention": [*[_pointer] * 4, *[_size] * 6, c_float, *[_pointer] * 2, _int],
        "tree_attention_backward": [*[_pointer] * 7, *[_size] * 6, c_float, *[_pointer] * 3, _int],
        "cached_attention": [
            *[_pointer] * 3,
            *[POINTER(Slab)] * 2,
            *[_pointer] * 5,
            *[_size] * 6,
            c_float,
            _pointer,
            _int,
        ],
    },
    headers=("vector.h",),
)
library, why_not = NATIVE.library, NATIVE.why_not
