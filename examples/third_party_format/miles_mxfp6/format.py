"""MXFP6: six bits per weight (sign, two exponent and three mantissa bits), and a power of two per 32 weights (OCP MX v1.0).

The magnitudes are 0, 1/8, ..., 15/8 in steps of 1/8, then 2 to 3.75 in steps of 1/4 and 4 to 7.5 in steps of 1/2. The scale
is the smallest 2^e that brings a block's largest magnitude to 7.5 or below; rounding is to nearest, ties to even.
"""

import torch

from miles_formats import Format, Stored, store

GRID = torch.tensor([m / 8 for m in range(8)] + [2**e * (1 + m / 8) for e in range(3) for m in range(8)])


class Mxfp6(Format):
    """``X.weight`` uint8 [N, 3K/4], four codes in three bytes, first lowest; ``X.weight_scale_inv`` uint8 [N, K/32], e + 127."""

    name, tile, exact, error = "mxfp6", (1, 32), False, 0.04

    def refuse(self, shape):
        return (
            None if shape[1] % 32 == 0 else f"32 weights of a row share a scale, and {shape[1]} is not a multiple of 32"
        )

    def storage(self, shape):
        rows, columns = shape
        return (
            Stored("weight", torch.uint8, (rows, columns * 3 // 4)),
            Stored("weight_scale_inv", torch.uint8, (rows, columns // 32)),
        )

    def quantize(self, weight, stats=None, out=None):
        blocks = weight.float().reshape(len(weight), -1, 32)
        mantissa, exponent = torch.frexp(blocks.abs().amax(-1))  # amax = mantissa * 2^exponent, 7.5 = 0.9375 * 2^3
        scale = (exponent - 3 + (mantissa > 0.9375).int()).clamp(-126, 126)
        x = torch.ldexp(blocks, -scale[..., None])
        step = torch.ldexp(torch.ones_like(x), (torch.frexp(x).exponent - 1).clamp(0, 2) - 3)
        nearest = ((x.abs() / step).round() * step).contiguous()
        codes = torch.searchsorted(GRID.to(x.device), nearest) + 32 * (x < 0)
        four = (codes.reshape(len(weight), -1, 4) << torch.tensor([0, 6, 12, 18], device=x.device)).sum(
            -1, keepdim=True
        )
        packed = four >> torch.tensor([0, 8, 16], device=x.device) & 255
        parts = {"weight": packed.to(torch.uint8).reshape(len(weight), -1)}
        return store({**parts, "weight_scale_inv": (scale + 127).to(torch.uint8)}, out)

    def dequantize(self, parts):
        packed, scale = parts["weight"], parts["weight_scale_inv"].int() - 127
        three = packed.reshape(len(packed), -1, 3).int() << torch.tensor([0, 8, 16], device=packed.device)
        codes = three.sum(-1, keepdim=True) >> torch.tensor([0, 6, 12, 18], device=packed.device) & 63
        values = GRID.to(packed.device)[codes % 32] * (1 - 2 * (codes // 32))
        return torch.ldexp(values.reshape(*scale.shape, 32), scale[..., None]).reshape(len(packed), -1)

    def config(self, unquantized):
        return {"quant_method": self.name, "weight_block_size": [1, 32], "modules_to_not_convert": list(unquantized)}
