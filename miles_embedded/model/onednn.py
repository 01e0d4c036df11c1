"""Matrix products in float32 on a CPU, by the faster of two libraries.

PyTorch hands float32 products to MKL, which takes the AVX2 path on a processor that is not Intel's, where oneDNN, in the same
build of PyTorch, uses 512-bit vectors (benchmarks/products.py). So on processors with units that wide, and from a few rows on,
products go to oneDNN. The rule looks at the processor and at the shape, never at a stopwatch: a run must continue with the
products it began with.

oneDNN generates code for each new shape; ``padded`` keeps the number of shapes small.

Few rows, as decoding has, take as long as reading the weights, and on an AMD processor MKL reads them slowly (benchmarks/products.py). It is
1.1 to 3 times as fast with the weights as the left operand, (w x^T)^T instead of x w^T, as long as x fits into half of the processor's
first cache; one row goes as two. Where it does not, oneDNN is up to 2 times as fast, and most so for two to four rows.

oneDNN brings the weights into an order of its own at every call. An engine, whose weights stay for many steps, lets it do so once (``Packs``):
products of 4 to 64 rows then take .6 to .95 of the time (benchmarks/products.py), for as much memory as the weights take, 1 GiB at most.
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
from miles_embedded.model.own_forward import put_forward

#: From this many rows on.
_ROWS = 32
#: Below, from so many weights on: entries of x with which the weights are the left operand, and inner columns from which on oneDNN multiplies.
_LARGE, _NEAR, _LONG = 1 << 16, 3840, 512
#: Rows of products that read packed weights, the rows they are packed for, and how many bytes of them there may be.
_FEW, _HINT, _MOST = range(4, 128), 64, 1 << 30


@cache
def available() -> bool:
    """Whether oneDNN is the faster library here: 512-bit units, on a processor MKL does not use them on."""
    return _has_vectors() and has_wide_units(cpu_info())


@cache
def slow_few() -> bool:
    """Whether MKL is slow with few rows: on an AMD processor."""
    return torch.backends.mkl.is_available() and "AuthenticAMD" in cpu_info()


@cache
def _has_vectors() -> bool:
    """Whether oneDNN is there and has vectors of 512 bits."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def has_wide_units(processor: str) -> bool:
    """Whether ``/proc/cpuinfo`` describes an AMD processor that computes 512 bits at once: Zen 5 (family 26) and later. Zen 4
    works such vectors off in halves, and MKL is as fast there."""
    family = re.search(r"^cpu family\s*: (\d+)$", processor, re.MULTILINE)
    return "AuthenticAMD" in processor and family is not None and int(family[1]) >= 26


def takes(x: Tensor, rows: int) -> bool:
    """Whether a product with ``rows`` rows of ``x`` goes to oneDNN."""
    return rows >= _ROWS and x.dtype == torch.float32 and x.device.type == "cpu" and available()


def padded(rows: int) -> int:
    """``rows`` rounded up to one of eight sizes an octave (at most an eighth more); as it is where it does not matter."""
    if rows < _ROWS or not available():
        return rows
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


def times(a: Tensor, b: Tensor) -> Tensor:
    """a [rows, inner] times b [inner, columns]; either may be a transposed view."""
    if takes(a, len(a)):
        return _by_onednn(a, b.t(), None)
    return torch.mm(a, b)


class Packs:
    """The weights of an engine's linear layers in oneDNN's order, made when a product wants them first; ``clear`` when weights are other ones."""

    def __init__(self) -> None:
        self._of: dict[nn.Linear, tuple[int | None, Tensor | None]] = {}
        self._bytes = 0

    def clear(self) -> None:
        """Forget them."""
        self._of.clear()
        self._bytes = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Products without gradients read them meanwhile, on an AMD processor with vectors of 512 bits."""
        token = _packs.set(self if slow_few() and _has_vectors() else None)
        try:
            yield
        finally:
            _packs.reset(token)

    def of(self, module: nn.Linear) -> Tensor | None:
        """Of one layer; None where there would be too many."""
        weight = module.weight
        version, packed = self._of.get(module, (None, None))
        if version != weight._version:
            if version is not None:
                self.clear()  # something changes weights in place
            if self._bytes + weight.nbytes <= _MOST:
                self._bytes += weight.nbytes
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _HINT)
            else:
                packed = None
            self._of[module] = weight._version, packed
        return packed


_packs: ContextVar[Packs | None] = ContextVar("packs", default=None)


def use_fast_linear(model: nn.Module) -> None:
    """Let the plain linear layers of ``model`` multiply by the faster product, forward and backward; parameters, names,
    classes and hooks stay, and a layer that is given another class computes as that class does."""
    if available() or slow_few():
        for module in model.modules():
            if type(module) is nn.Linear:
                put_forward(module, _linear)


def _linear(module: nn.Linear, input: Tensor) -> Tensor:
    """[..., in] -> [..., out]."""
    rows = input.numel() // max(input.shape[-1], 1)
    if module.weight.dtype != input.dtype:
        return nn.Linear.forward(module, input)
    if rows in _FEW and module.weight.numel() >= _LARGE and (packs := _packs.get()) is not None:
        packed = packs.of(module) if input.dtype == torch.float32 and not torch.is_grad_enabled() else None
        if packed is not None:
            return _by_onednn(input, packed, module.bias)
    if 0 < rows < _ROWS and module.weight.numel() >= _LARGE and _decodes(input):
        return _few_rows(module, input, rows)
    if not takes(input, rows):
        return nn.Linear.forward(module, input)
    out: Tensor = _Linear.apply(input, module.weight, module.bias)
    return out


def _decodes(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled() and slow_few()


def _few_rows(module: nn.Linear, input: Tensor, rows: int) -> Tensor:
    """``_linear`` of less than ``_ROWS`` rows, see the head of this file."""
    inner = input.shape[-1]
    if max(rows, 2) * inner <= _NEAR:
        return _turned(module, input, rows)
    if rows > 1 and inner >= _LONG and _has_vectors():
        return _by_onednn(input, module.weight, module.bias)
    return nn.Linear.forward(module, input)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _turned(module: nn.Linear, input: Tensor, rows: int) -> Tensor:
    """The product with the weights as the left operand."""
    x = input.reshape(rows, -1)
    out = torch.mm(module.weight, (x if rows > 1 else torch.cat([x, x])).t()).t()[:rows].contiguous()
    if module.bias is not None:
        out += module.bias
    return out.view(*input.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        needs = ctx.needs_input_grad
        return (
            times(grad, weight).view(x.shape) if needs[0] else None,
            times(grad.t(), x.reshape(-1, x.shape[-1])) if needs[1] else None,
            grad.sum(0) if needs[2] else None,
        )
