"""Block-wise FP8: one byte per weight, one scale per 128 x 128 tile.

An E4M3 number has a sign, four exponent and three mantissa bits: 448 is the largest, 2^-9 the smallest above zero,
and over 15 octaves neighbours are 6 to 12 % apart. Three bits are enough for a weight if the range is: so a matrix
is split into tiles of 128 x 128, and each tile has a scale that maps its largest magnitude to 448. An outlier then costs precision
only in its tile. The scales take 4 bytes per 16,384 weights. A Hopper tensor core multiplies 128 elements before its partial sum is
promoted to FP32, so applying the scales there is almost free (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3).

    scale = max(amax, 1e-10) / 448          in FP32
    code  = E4M3(clamp(x / scale, +-448))   to nearest, ties to even

Three details decide whether two implementations agree. The rule divides: multiplying by 1/scale rounds twice and changes 0.05 % of the
codes of BF16 weights. The lower bound 1e-10 avoids 0/0 for a tile of zeros. Tiles at the edge of a matrix are padded with zeros, which does
not change the maximum.

With power-of-two scales (UE8M0: Blackwell's tensor cores and DeepGEMM store an exponent only) the scale is rounded
up to the smallest 2^e >= max(amax, 1e-10) / 448. The exponent is read from the bits (frexp); a logarithm would be wrong just above each
power of two.

Relative RMS error on N(0, 1): 0.0265. Quantising FP32 ``dequantize(quantize(x))`` again gives the same codes and scales. For a BF16 copy
of it this holds only with power-of-two scales, which make it exact. With these, BF16's largest magnitudes may be rounded up to 2^128, which
is Inf in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_formats import (
    READABLE,
    Config,
    Format,
    NoProduct,
    Parts,
    Stored,
    allocate_output,
    convert_for_kernel,
    runs_kernels,
    store,
)
from miles_fp8 import activation_form
from miles_fp8.layout import AMAX_FLOOR, CODES, E4M3, E4M3_MAX, SCALES, TILE
from miles_fp8.product import Fp8Product

KERNEL_CAPABILITY = (8, 9)  # the first GPUs that convert to E4M3
#: Weights that share a kernel launch must be aligned to this many bytes.
ALIGNED = 16


class Fp8(Format):
    """Block-wise FP8: E4M3 codes in tiles of 128 x 128 with one scale each.

    Activations are quantised by the same rule in blocks of 1 x 128 along K.

    Stored as ``X.weight`` float8_e4m3fn [N, K] and ``X.weight_scale_inv`` FP32 [ceil(N/128), ceil(K/128)], with
    w = code * scale_inv, as in DeepSeek-V3's checkpoints.

    Args:
        power_of_two_scales: round scales up to powers of two.
        skip: selectors of weights to leave unquantised.
        activation_form: ``divide`` (this module's rule), or one of ``activation_form.FORMS``.
        fixed_order: native products add in one order for any number of rows.
    """

    name = "fp8"
    tile = (TILE, TILE)
    error = 0.03
    shows = SCALES
    together = 64
    skip_origin = "--fp8-skip-layers"

    def __init__(
        self,
        power_of_two_scales: bool = False,
        skip: tuple[str, ...] = (),
        activation_form: str = "divide",
        fixed_order: bool = False,
    ) -> None:
        self.power_of_two_scales = power_of_two_scales
        self.activation_form = activation_form
        self.skip = skip
        self.fixed_order = fixed_order
        # A tile whose largest value rounds down to 224 would get the next smaller exponent: same values, other codes.
        self.exact = not power_of_two_scales

    @classmethod
    def from_config(cls, config: Config) -> Fp8:
        options = config.plugin("fp8")
        return cls(options.power_of_two_scales, options.skip_layers, options.activation_form, options.fixed_order)

    def caution(self, shape: tuple[int, int]) -> str | None:
        if shape[0] % TILE or shape[1] % TILE:
            return (
                f"Transformers loads FP8 weights only if both sizes are multiples of {TILE}, and would reject this one"
            )
        return None

    @classmethod
    def recognises(cls, block: Mapping[str, Any]) -> bool:
        return (
            block.get("quant_method") == "fp8"
            and list(block.get("weight_block_size") or ()) == [TILE, TILE]
            and block.get("fmt", "e4m3") == "e4m3"
            and block.get("activation_scheme", "dynamic") == "dynamic"
        )

    @classmethod
    def from_checkpoint(cls, block: Mapping[str, Any]) -> Fp8:
        return cls(block.get("scale_fmt") == "ue8m0")

    def storage(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        rows, columns = shape
        return (
            Stored(CODES, E4M3, (rows, columns)),
            Stored(SCALES, torch.float32, (-(-rows // TILE), -(-columns // TILE))),
        )

    def quantize(self, weight: Tensor, stats: Tensor | None = None, out: Parts | None = None) -> Parts:
        if runs_kernels(weight, KERNEL_CAPABILITY):
            from miles_fp8 import kernels  # needs Triton

            parts = allocate_output(self, (weight.shape[0], weight.shape[1]), weight.device, out)
            kernels.quantize(convert_for_kernel(weight), parts[CODES], parts[SCALES], self.power_of_two_scales)
            return store(parts, out)
        tiles = in_tiles(weight.float())
        amax = tiles.abs().amax((1, 3))
        scale = self.scale(amax).masked_fill_(~amax.isfinite(), torch.nan)
        codes = torch.div(tiles, scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
        return store({CODES: flat(codes, weight.shape), SCALES: scale}, out)

    def quantize_all(self, weights: Sequence[Tensor], outs: Sequence[Parts | None]) -> list[Parts]:
        """See ``Format.quantize_all``; weights of the same shape, strides and dtype share one kernel launch."""
        found: list[Parts | None] = [None] * len(weights)
        alike: dict[Any, list[int]] = {}
        for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            if _shares_launches(weight):
                parts = allocate_output(self, (weight.shape[0], weight.shape[1]), weight.device, out)
                if parts[CODES].data_ptr() % ALIGNED == 0:
                    found[i] = parts
                    alike.setdefault(_layout(weight), []).append(i)
        for group in alike.values():
            from miles_fp8 import kernels  # needs Triton

            made = [part for i in group if (part := found[i]) is not None]
            codes, scales = [p[CODES] for p in made], [p[SCALES] for p in made]
            kernels.quantize_alike([weights[i] for i in group], codes, scales, self.power_of_two_scales)
        return [
            self.quantize(weight, out=out) if parts is None else store(parts, out)
            for weight, out, parts in zip(weights, outs, found, strict=True)
        ]

    def make_writer(self, weights: Sequence[Tensor], outs: Sequence[Parts]) -> Callable[[], None]:
        """See ``Format.make_writer``; weights of the same shape, strides and dtype share one kernel launch, whose addresses are on the GPU."""
        alike: dict[Any, list[int]] = {}
        alone = []
        for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            fits = out[CODES].data_ptr() % ALIGNED == 0 and all(part.is_contiguous() for part in out.values())
            if fits and _shares_launches(weight):
                alike.setdefault(_layout(weight), []).append(i)
            else:
                alone.append((weight, out))
        launches = []
        for group in alike.values():
            from miles_fp8 import kernels  # needs Triton

            codes, scales = [outs[i][CODES] for i in group], [outs[i][SCALES] for i in group]
            launches += kernels.prepare_alike([weights[i] for i in group], codes, scales, self.power_of_two_scales)

        def write() -> None:
            for launch in launches:
                launch()
            for weight, out in alone:
                self.quantize(weight, out=out)

        return write

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        codes, scale = parts[CODES], parts[SCALES]
        if runs_kernels(codes, KERNEL_CAPABILITY):
            from miles_fp8 import kernels  # needs Triton

            return kernels.dequantize(codes.contiguous(), scale.contiguous())
        return flat(in_tiles(codes.float()) * scale[:, None, :, None], codes.shape)

    def dequantize_all(self, parts: Sequence[Mapping[str, Tensor]], outs: Sequence[Tensor]) -> None:
        """See ``Format.dequantize_all``; weights with ``outs`` of the same shape, strides and dtype share one kernel launch."""
        alike: dict[Any, list[int]] = {}
        for i, (part, out) in enumerate(zip(parts, outs, strict=True)):
            codes = part[CODES]
            aligned = codes.data_ptr() % ALIGNED == 0 == out.data_ptr() % ALIGNED
            if aligned and codes.is_contiguous() and part[SCALES].is_contiguous():
                alike.setdefault((*_layout(out), codes.device), []).append(i)
            else:
                out.copy_(self.dequantize(part))
        for group in alike.values():
            codes, out = parts[group[0]][CODES], outs[group[0]]
            plain = out.stride(1) == 1 and out.dtype in READABLE
            if plain and runs_kernels(codes, KERNEL_CAPABILITY) and out.is_cuda:
                from miles_fp8 import kernels  # needs Triton

                codes_of, scales_of = [parts[i][CODES] for i in group], [parts[i][SCALES] for i in group]
                kernels.dequantize_alike(codes_of, scales_of, [outs[i] for i in group])
            else:
                for i in group:
                    outs[i].copy_(self.dequantize(parts[i]))

    def fake_quantize_stacked(self, weights: Tensor, out: Tensor) -> Tensor | None:
        """See ``Format.fake_quantize_stacked``."""
        if not runs_kernels(weights, KERNEL_CAPABILITY):
            return None
        from miles_fp8 import kernels  # needs Triton

        return kernels.fake_quantize_weights(weights, out, self.power_of_two_scales)

    def fake_quantize_activation(self, x: Tensor) -> Tensor:
        """See ``Format.fake_quantize_activation``; blocks of 1 x 128, the last block of a row may be shorter."""
        if self.activation_form != "divide":
            return activation_form.fake_quantize(x, self.activation_form)
        columns = x.shape[-1]
        if runs_kernels(x, KERNEL_CAPABILITY):
            from miles_fp8 import kernels  # needs Triton

            return kernels.fake_quantize(convert_for_kernel(x), self.power_of_two_scales).to(x.dtype)
        codes, scale = self.quantize_activation(x.reshape(-1, columns))
        blocks = torch.nn.functional.pad(codes.float(), (0, -columns % TILE)).view(*scale.shape, TILE)
        return (blocks * scale.unsqueeze(-1)).flatten(1)[:, :columns].reshape(x.shape).to(x.dtype)

    def quantize_activation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise x [M, K] to codes E4M3 [M, K] and scales FP32 [M, ceil(K/128)], as in ``fake_quantize_activation``.

        A block with a non-finite value has the scale NaN."""
        rows, columns = x.shape
        if runs_kernels(x, KERNEL_CAPABILITY):
            from miles_fp8 import kernels  # needs Triton

            codes, scale = kernels.activation_codes(convert_for_kernel(x), self.power_of_two_scales)
            return codes[:rows], scale[:rows]
        padded = torch.nn.functional.pad(x.float(), (0, -columns % TILE))
        blocks = padded.reshape(rows, padded.shape[1] // TILE, TILE)
        amax = blocks.abs().amax(-1)
        scale = self.scale(amax).masked_fill_(~amax.isfinite(), torch.nan)
        codes = torch.div(blocks, scale.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
        return codes.flatten(1)[:, :columns].contiguous(), scale

    def product(self, device: torch.device, dtype: torch.dtype) -> Fp8Product:
        """See ``miles_fp8.product``; supports only the activation form ``divide``."""
        if self.activation_form != "divide":
            raise NoProduct(f"its kernel divides activations, and --fp8-activation-form is {self.activation_form}")
        return Fp8Product(device, dtype, self.power_of_two_scales, self.fixed_order)

    def scale(self, amax: Tensor) -> Tensor:
        """Return the FP32 scales for the FP32 amax of each tile."""
        # A full tensor as divisor: dividing by a Python number multiplies by its reciprocal on a GPU.
        scale = torch.div(amax.clamp(min=AMAX_FLOOR), torch.full_like(amax, E4M3_MAX))
        return round_up_to_power_of_two(scale) if self.power_of_two_scales else scale

    def config(self, unquantized: list[str]) -> dict[str, Any]:
        block = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [TILE, TILE],
            "modules_to_not_convert": list(unquantized),
        }
        return block | ({"scale_fmt": "ue8m0"} if self.power_of_two_scales else {})


def _shares_launches(weight: Tensor) -> bool:
    """Whether a kernel can quantise this weight together with others."""
    readable = runs_kernels(weight, KERNEL_CAPABILITY) and weight.dtype in READABLE
    return readable and weight.data_ptr() % ALIGNED == 0


def _layout(weight: Tensor) -> tuple[Any, ...]:
    """Return what weights that share a launch have in common."""
    return weight.dtype, weight.shape, weight.stride(), weight.device


def in_tiles(matrix: Tensor) -> Tensor:
    """Reshape [N, K] to [N tiles, 128, K tiles, 128], padded with zeros at the edges; a view if no padding is needed."""
    rows, columns = matrix.shape
    below, beside = -rows % TILE, -columns % TILE
    if below or beside:
        matrix = torch.nn.functional.pad(matrix, (0, beside, 0, below))
    return matrix.reshape((rows + below) // TILE, TILE, (columns + beside) // TILE, TILE)


def flat(tiles: Tensor, shape: torch.Size) -> Tensor:
    """Inverse of ``in_tiles``; drops the padding."""
    down, height, across, width = tiles.shape
    return tiles.reshape(down * height, across * width)[: shape[0], : shape[1]].contiguous()


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """Return the smallest power of two >= x, for normal FP32 x > 0 with a finite result."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return ((exponent + 127) << 23).view(torch.float32)
