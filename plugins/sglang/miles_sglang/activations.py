"""How SGLang's FP8 layers round their inputs, asked of the kernel that they use."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.format import BYTES, Format, Parts, Quantizer, bounded
from miles_sglang.link import Link


class OwnActivations(Quantizer):
    """Weights as the format quantises them, because SGLang is sent the codes; activations by SGLang's kernel, which multiplies
    where the format divides: a scale may differ in its last bit, which is up to one unit of a BF16 number after rounding, and a few
    codes in ten thousand are the neighbours of the format's."""

    weights = BYTES
    activations = bounded(2**-8)

    def __init__(self, link: Link, format: Format) -> None:
        self.link, self.format = link, format

    def weight(self, weight: Tensor) -> Parts:
        return self.format.quantize(weight)

    def activation(self, x: Tensor) -> Tensor:
        numbers = x.detach().float().cpu().contiguous()
        found = self.link.quantize((x.shape[0], x.shape[1]), numbers.numpy().tobytes())
        return torch.frombuffer(bytearray(found), dtype=torch.float32).reshape(x.shape).to(x.dtype)
