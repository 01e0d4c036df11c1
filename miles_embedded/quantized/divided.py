"""Experts whose codes are divided among the devices of one process.

A frozen base that is larger than a GPU is stored on several: each device has the codes of consecutive experts of every layer. The rest of the
model is on the first device, the home. There the rows are sorted by expert; each device receives those of its experts, decodes its experts and
multiplies, and the results return to the home, which sums the choices of a row. Engine and trainer of the process use the same codes in this
way. Devices work at the same time, since the host only launches; it waits once per layer, for the number of rows of each expert.

The result is the same for every number of devices from two on. One device computes other products (``model.experts``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.data.weight_unit import Encoded
from miles_core.errors import CheckpointError
from miles_core.precision.format import Format
from miles_embedded.model.experts import DIVIDED, is_standard
from miles_embedded.model.grouped_experts import (
    combine,
    dispatch,
    gpu_has_grouped,
    grouped_linear,
    swiglu_of_halves,
)
from miles_embedded.model.sorted_choices import SortedChoices, sort_choices
from miles_embedded.model.storage import codes_of, put_codes
from miles_embedded.model.views import View
from miles_embedded.quantized.codes import EncodedParameter, encoded_parameter

_WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class DividedParameter:
    """The codes of one parameter of experts [experts, ...], as ``model.storage.Codes``.

    Attributes:
        parts: consecutive experts, each part on a device.
        like: the parameter without storage, on the home device.
    """

    parts: tuple[EncodedParameter, ...]
    like: Tensor

    @torch.no_grad()
    def values(self) -> Tensor:
        """Decode all experts on the home device."""
        like, first = self.like, 0
        values = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        for part in self.parts:
            count = len(part.like)
            values[first : first + count].copy_(part.values())
            first += count
        return values

    def tensors(self) -> Iterator[Tensor]:
        """Yield codes and scales of all devices."""
        for part in self.parts:
            yield from part.tensors()


def store_codes(
    parameter: nn.Parameter, parts: Sequence[tuple[View, Encoded]], format: Format, devices: Sequence[torch.device]
) -> None:
    """Store a parameter as the codes of its checkpoint tensors only: on the first device, or experts [experts, ...] in ranges on all."""
    home = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=devices[0])
    if parameter.ndim != 3 or len(devices) == 1:
        put_codes(parameter, encoded_parameter(home, parts, format), devices[0])
        return
    home.untyped_storage().resize_(0)
    experts, step = parameter.shape[0], parameter.stride(0)
    ends = [experts * (i + 1) // len(devices) for i in range(len(devices))]
    found = []
    for device, first, end in zip(devices, [0, *ends], ends, strict=False):
        own = [
            (View(v.name, v.source, v.size, v.stride, v.offset - first * step), encoded)
            for v, encoded in parts
            if first <= v.offset // step < end
        ]
        size = (end - first, *parameter.shape[1:])
        like = torch.empty_strided(size, parameter.stride(), dtype=parameter.dtype, device=device)
        found.append(encoded_parameter(like, own, format))
    put_codes(parameter, DividedParameter(tuple(found), home), devices[0])


def install_divided(path: str, module: Any) -> bool:
    """Let a module compute with experts on several devices; returns whether its parameters are divided.

    Raises:
        CheckpointError: its experts are not standard ones, or only a part of its weights is encoded.
    """
    codes = [codes_of(p) for p in module.parameters(recurse=False)]
    if not any(isinstance(each, DividedParameter) for each in codes):
        return False
    weights = [codes_of(getattr(module, name, None)) for name in _WEIGHTS]
    if not (
        is_standard(module, module.down_proj.dtype) and all(isinstance(each, DividedParameter) for each in weights)
    ):
        raise CheckpointError(
            f"{path}: these experts cannot be divided among GPUs, which needs encoded weights, no biases and the usual gate; leave them on one GPU"
        )
    module.__dict__[DIVIDED] = DividedExperts(*weights)  # type: ignore[arg-type]
    return True


class DividedExperts:
    """Computes the standard experts of one module on several devices."""

    def __init__(self, gate_up: DividedParameter, down: DividedParameter) -> None:
        self.parts = tuple(zip(gate_up.parts, down.parts, strict=True))
        self.experts = len(gate_up.like)

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts of hidden [rows, D] for choices index and weights [rows, k]; returns [rows, D]."""
        choices = sort_choices(index, self.experts)
        assert choices.counts is not None
        x, counts, found, at = dispatch(hidden, choices), choices.counts, [], 0
        pieces, first = [], 0
        for gate_up, _ in self.parts:  # all rows are on their way before the first product is launched
            own = counts[first : first + len(gate_up.like)]
            pieces.append((x[at : at + sum(own)].to(gate_up.like.device, non_blocking=True), own))
            first, at = first + len(own), at + sum(own)
        for (gate_up, down), (piece, own) in zip(self.parts, pieces, strict=True):
            found.append(_Product.apply(piece, gate_up, down, own) if len(piece) else piece)
        out = torch.cat([each.to(hidden.device, non_blocking=True) for each in found])
        return combine(out, weights, choices).to(hidden.dtype)


class _Product(torch.autograd.Function):
    """``down(silu(gate) * up)`` of rows sorted by expert. The backward pass decodes the weights again; they have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: EncodedParameter, down: EncodedParameter, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weights, ctx.counts = (gate_up, down), counts
        return _multiply(x, gate_up, down, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            gate_up, down = ctx.weights
            y = _multiply(x, gate_up, down, ctx.counts)
        (grad,) = torch.autograd.grad(y, x, grads[0])
        return grad, None, None, None


def _multiply(x: Tensor, gate_up: EncodedParameter, down: EncodedParameter, counts: list[int]) -> Tensor:
    weight = gate_up.values()
    grouped = x.is_cuda and gpu_has_grouped(x, weight)
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x.device) if grouped else x.new_empty(0)
    choices = SortedChoices(ends, ends, ends, ends, None if grouped else counts)
    return grouped_linear(swiglu_of_halves(grouped_linear(x, weight, choices)), down.values(), choices)
