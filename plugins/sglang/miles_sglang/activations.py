"""Rounding of activations in SGLang's FP8 layers, computed by SGLang's own kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_formats import BYTES, Format, Parts, Quantizer, bounded
from miles_sglang.link import Link


class OwnActivations(Quantizer):
    """Quantises weights with the format, because SGLang receives the codes, and activations with SGLang's kernel.

    SGLang's kernel multiplies by the reciprocal where the format divides. A scale may therefore differ in its last bit (up to one
    BF16 unit after rounding), and a few codes in ten thousand differ by one step.
    """

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
