"""SGLang's operators of short causal convolutions in PyTorch: the compiled ones exist for GPUs and for CPUs with AMX.

A convolution of width w over the inputs of a sequence keeps the last w - 1 inputs in ``states`` [slots, channels, w - 1]. Both operators write
their results into ``x``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    starts: Tensor,
    slots: Tensor,
    continued: Tensor,
    silu: bool,
    pad: int,
) -> None:
    """Convolve whole prompts, one after the other in ``x`` [channels, tokens]; ``continued`` ones begin with their slot's state."""
    bounds = starts.tolist()
    for begin, end, slot, known in zip(bounds, bounds[1:], slots.tolist(), continued.tolist(), strict=False):
        if slot == pad:
            continue
        before = states[slot] if known else torch.zeros_like(states[slot])
        inputs = torch.cat([before, x[:, begin:end]], 1)
        states[slot] = inputs[:, -before.shape[1] :]
        x[:, begin:end] = _convolve(inputs[None], weight, bias, silu)[0]


def causal_conv1d_update(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, _: Any, slots: Tensor, pad: int
) -> None:
    """Convolve further tokens of some sequences, ``x`` [sequences, channels, tokens]."""
    rows = (slots != pad).nonzero().flatten()
    used = slots[rows].long()
    inputs = torch.cat([states[used], x[rows]], 2)
    states[used] = inputs[..., -states.shape[-1] :].to(states.dtype)
    x[rows] = _convolve(inputs, weight, bias, silu)


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Convolve ``inputs`` [sequences, channels, w - 1 + tokens]; returns [sequences, channels, tokens]."""
    out = torch.nn.functional.conv1d(inputs, weight[:, None].to(inputs.dtype), bias, groups=len(weight))
    return torch.nn.functional.silu(out) if silu else out
