"""Float32 matrix products on a CPU with the faster of two libraries.

PyTorch dispatches float32 products to MKL, which uses its AVX2 code path on processors other than Intel's, while oneDNN, part of the
same build of PyTorch, uses 512-bit vectors. On processors with 512-bit units, products with enough rows therefore use oneDNN. The decision
depends only on processor and shape, not on measurements, because a resumed run must use the products it started with. The rules follow
measured times of both libraries.

oneDNN generates code for each new shape; ``pad_rows`` keeps the number of shapes small.

Products with few rows, as in decoding, are limited by reading the weights, which MKL does slowly on AMD processors.
With the weights as the left operand, (w x^T)^T instead of x w^T, MKL is faster while x fits into
half of the processor's L1 cache; a single row is computed as two. Where x does not fit, oneDNN is faster, most for two to four rows.

oneDNN reorders the weights at every call. An engine, whose weights last for many steps, reorders them once (``Packs``): products of
4 to 127 rows then take less time and need additional memory of the size of the weights, limited to 1 GiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.observe.environment import cpu_info
from miles_embedded.model.parts import put_forward

#: Smallest number of rows for oneDNN.
_ROWS = 32
#: With fewer rows: smallest number of weights, most entries of x with the weights as left operand, and fewest inner columns for oneDNN.
_LARGE, _NEAR, _LONG = 1 << 16, 3840, 512
#: Packed weights: rows of the products that use them, rows they are packed for, and largest total size in bytes.
_FEW, _HINT, _MOST = range(4, 128), 64, 1 << 30


@cache
def available() -> bool:
    """Whether oneDNN is the faster library: the processor has 512-bit units that MKL does not use."""
    return _has_vectors() and has_wide_units(cpu_info())


@cache
def mkl_is_slow() -> bool:
    """Whether MKL is slow for few rows, as on AMD processors."""
    return torch.backends.mkl.is_available() and "AuthenticAMD" in cpu_info()


@cache
def _has_vectors() -> bool:
    """Whether oneDNN is available with 512-bit vectors."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def has_wide_units(processor: str) -> bool:
    """Whether ``/proc/cpuinfo`` describes an AMD processor with full 512-bit units: Zen 5 (family 26) and later.

    Zen 4 splits such vectors into halves, and MKL is as fast there.
    """
    family = re.search(r"^cpu family\s*: (\d+)$", processor, re.MULTILINE)
    return "AuthenticAMD" in processor and family is not None and int(family[1]) >= 26


def use_onednn(x: Tensor, rows: int) -> bool:
    """Whether a product with ``rows`` rows of ``x`` uses oneDNN."""
    return rows >= _ROWS and x.dtype == torch.float32 and x.device.type == "cpu" and available()


def pad_rows(rows: int) -> int:
    """Round ``rows`` up to one of eight sizes per octave (at most one eighth more); unchanged where oneDNN is not used."""
    if rows < _ROWS or not available():
        return rows
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [rows, inner] by b [inner, columns]; either may be a transposed view."""
    if use_onednn(a, len(a)):
        return _multiply_onednn(a, b.t(), None)
    return torch.mm(a, b)


class Packs:
    """Packed copies of an engine's linear weights, made on first use. Call ``clear`` when weights change."""

    def __init__(self) -> None:
        self._of: dict[nn.Linear, tuple[int | None, Tensor | None]] = {}
        self._bytes = 0

    def clear(self) -> None:
        """Drop all packed weights."""
        self._of.clear()
        self._bytes = 0

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Let products without gradients use the packed weights inside this context, on AMD processors with 512-bit vectors."""
        token = _packs.set(self if mkl_is_slow() and _has_vectors() else None)
        try:
            yield
        finally:
            _packs.reset(token)

    def get(self, module: nn.Linear) -> Tensor | None:
        """Return the packed weight of a layer; None if the size limit is reached."""
        weight = module.weight
        version, packed = self._of.get(module, (None, None))
        if version != weight._version:
            if version is not None:
                self.clear()  # weights were changed in place
            if self._bytes + weight.nbytes <= _MOST:
                self._bytes += weight.nbytes
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _HINT)
            else:
                packed = None
            self._of[module] = weight._version, packed
        return packed


_packs: ContextVar[Packs | None] = ContextVar("packs", default=None)


def use_fast_linear(model: nn.Module) -> None:
    """Make the plain linear layers of ``model`` use the faster product, forward and backward.

    Parameters, names, classes and hooks do not change. A layer whose class is changed later uses the forward of that class.
    """
    if available() or mkl_is_slow():
        for module in model.modules():
            if type(module) is nn.Linear:
                put_forward(module, _linear)


def _linear(module: nn.Linear, input: Tensor) -> Tensor:
    """Linear layer: [..., in] -> [..., out]."""
    rows = input.numel() // max(input.shape[-1], 1)
    if module.weight.dtype != input.dtype:
        return nn.Linear.forward(module, input)
    if rows in _FEW and module.weight.numel() >= _LARGE and (packs := _packs.get()) is not None:
        packed = packs.get(module) if input.dtype == torch.float32 and not torch.is_grad_enabled() else None
        if packed is not None:
            return _multiply_onednn(input, packed, module.bias)
    if 0 < rows < _ROWS and module.weight.numel() >= _LARGE and _is_decoding(input):
        return _few_rows(module, input, rows)
    if not use_onednn(input, rows):
        return nn.Linear.forward(module, input)
    # ``_Linear`` gets a matrix, so that it returns a new tensor: its result may be changed in place (Gemma 3n does), a view may not
    out: Tensor = _Linear.apply(input.reshape(rows, -1), module.weight, module.bias)
    return out.view(*input.shape[:-1], -1)


def _is_decoding(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled() and mkl_is_slow()


def _few_rows(module: nn.Linear, input: Tensor, rows: int) -> Tensor:
    """``_linear`` with fewer than ``_ROWS`` rows; see the module docstring."""
    inner = input.shape[-1]
    if max(rows, 2) * inner <= _NEAR:
        return _multiply_left(module, input, rows)
    if rows > 1 and inner >= _LONG and _has_vectors():
        return _multiply_onednn(input, module.weight, module.bias)
    return nn.Linear.forward(module, input)


def _multiply_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _multiply_left(module: nn.Linear, input: Tensor, rows: int) -> Tensor:
    """Compute the product with the weights as the left operand."""
    x = input.reshape(rows, -1)
    out = torch.mm(module.weight, (x if rows > 1 else torch.cat([x, x])).t()).t()[:rows].contiguous()
    if module.bias is not None:
        out += module.bias
    return out.view(*input.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        needs = ctx.needs_input_grad
        return (
            matmul(grad, weight).view(x.shape) if needs[0] else None,
            matmul(grad.t(), x.reshape(-1, x.shape[-1])) if needs[1] else None,
            grad.sum(0) if needs[2] else None,
        )
