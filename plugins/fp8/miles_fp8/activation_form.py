"""Other forms of the activation rule: those of engines that multiply where the format divides.

    divide       scale = amax / 448                     code = E4M3(x / scale)           the format's own (``format``)
    reciprocal   scale = amax / 448                     code = E4M3(x * (1 / scale))
    ratio        scale = amax * fp32(1 / 448)           code = E4M3(x * (448 / amax))

with amax = max(largest magnitude of the block, 1e-10), each step rounded to FP32, codes clamped to +-448 and rounded to
nearest, ties to even. A multiplication by a rounded reciprocal rounds twice, so some values beside a boundary between two codes
fall on its other side. With power-of-two scales all three are one.

Who computes so (SGLang 0.5.17): ``reciprocal`` is its Triton kernel for groups of a token, ``ratio`` its CUDA kernel
(``per_token_group_quant``) and DeepEP's, whose floor of amax is 1e-4. Both are compiled with fast math or use Triton's
``/``, where a quotient may be an ulp or two beside the one rounded correctly, which is taken here: how many codes that
changes on a GPU is what the parity probe measures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles_fp8.format import AMAX_FLOOR, E4M3, E4M3_MAX, TILE

#: amax -> (scale, factor), both FP32.
Form = Callable[[Tensor], tuple[Tensor, Tensor]]


def reciprocal(amax: Tensor) -> tuple[Tensor, Tensor]:
    """The scale is the format's; values are multiplied by its rounded reciprocal."""
    scale = torch.div(amax, torch.full_like(amax, E4M3_MAX))
    return scale, torch.div(torch.ones_like(amax), scale)


def ratio(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Neither number comes from the other: the scale by a multiplication, the factor by a division."""
    largest = torch.full_like(amax, E4M3_MAX)
    return amax * torch.div(torch.ones_like(amax), largest), torch.div(largest, amax)


FORMS: dict[str, Form] = {"reciprocal": reciprocal, "ratio": ratio}


def fake_quantize(x: Tensor, form: str) -> Tensor:
    """x [..., K] -> what its codes in blocks of 1 x 128 mean, in x's dtype; a block that is not finite is NaN. The last block
    of a row may be shorter.

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
