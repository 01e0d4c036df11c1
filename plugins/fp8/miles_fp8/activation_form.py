"""Variants of the activation quantisation, as in engines that multiply where the format divides.

    divide       scale = amax / 448                     code = E4M3(x / scale)           the rule of ``format``
    reciprocal   scale = amax / 448                     code = E4M3(x * (1 / scale))
    ratio        scale = amax * fp32(1 / 448)           code = E4M3(x * (448 / amax))

with amax = max(largest magnitude of the block, 1e-10), each step rounded to FP32, codes clamped to +-448 and rounded to
nearest, ties to even. Multiplying by a rounded reciprocal rounds twice, so some values close to a boundary between two codes get the
neighbouring code. With power-of-two scales all three variants are equal.

In SGLang 0.5.17, ``reciprocal`` is the Triton kernel for per-token groups, and ``ratio`` is the CUDA kernel
(``per_token_group_quant``) and DeepEP's kernel, whose lower bound of amax is 1e-4. These kernels use fast math or Triton's ``/``, whose
quotients may be off by one or two ulp; this module rounds quotients correctly. The parity probe measures how many codes differ on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles_fp8.layout import AMAX_FLOOR, E4M3, E4M3_MAX, TILE

#: amax -> (scale, factor), both FP32.
Form = Callable[[Tensor], tuple[Tensor, Tensor]]


def reciprocal(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the format's scale and its rounded reciprocal as the factor."""
    scale = torch.div(amax, torch.full_like(amax, E4M3_MAX))
    return scale, torch.div(torch.ones_like(amax), scale)


def ratio(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale amax * fp32(1 / 448) and factor 448 / amax, computed independently."""
    largest = torch.full_like(amax, E4M3_MAX)
    return amax * torch.div(torch.ones_like(amax), largest), torch.div(largest, amax)


FORMS: dict[str, Form] = {"reciprocal": reciprocal, "ratio": ratio}


def fake_quantize(x: Tensor, form: str) -> Tensor:
    """Quantise x [..., K] in blocks of 1 x 128 and dequantise it to x's dtype. A block with a non-finite value becomes NaN. The last
    block of a row may be shorter.

    Args:
        x: any shape and device.
        form: a name in ``FORMS``.
    """
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % TILE))
    blocks = padded.reshape(*x.shape[:-1], -1, TILE)
    largest = blocks.abs().amax(-1, keepdim=True)
    scale, factor = FORMS[form](largest.clamp(min=AMAX_FLOOR))
    codes = (blocks * factor).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    scale = scale.masked_fill(~largest.isfinite(), torch.nan)
    return (codes.float() * scale).reshape(padded.shape)[..., :columns].to(x.dtype)
