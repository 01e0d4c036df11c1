"""SGLang's quantisers. SGLang receives codes of weights from the run; activations it rounds with kernels of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_formats import BYTES, VALUES, Format, FormatItself, Parity, Parts, Quantizer, bounded
from miles_sglang.formats import FORMATS
from miles_sglang.link import Link

#: Number format -> parity of SGLang's activation kernel. For FP8 it multiplies by the reciprocal where the format divides. A scale may
#: therefore differ in its last bit (up to one BF16 unit after rounding), and a few codes in ten thousand differ by one step. Scales of MXFP8
#: are powers of two, so no rounding can differ; this kernel has not been run on hardware.
PARITIES: dict[str, Parity] = {"fp8": bounded(2**-8), "mxfp8": VALUES}


def make_quantizer(link: Link, format: Format) -> Quantizer | None:
    """Return SGLang's quantiser; None for a format in which SGLang does not compute."""
    if format.name not in FORMATS:
        return None
    return OwnActivations(link, format) if format.quantizes_activations else FormatItself(format)


class OwnActivations(Quantizer):
    """Quantises weights with the format and activations with SGLang's kernel."""

    weights = BYTES

    def __init__(self, link: Link, format: Format) -> None:
        self.link, self.format = link, format
        self.activations = PARITIES[format.name]

    def weight(self, weight: Tensor) -> Parts:
        return self.format.quantize(weight)

    def activation(self, x: Tensor) -> Tensor:
        numbers = x.detach().float().cpu().contiguous()
        found = self.link.quantize(self.format.name, (x.shape[0], x.shape[1]), numbers.numpy().tobytes())
        return torch.frombuffer(bytearray(found), dtype=torch.float32).reshape(x.shape).to(x.dtype)
