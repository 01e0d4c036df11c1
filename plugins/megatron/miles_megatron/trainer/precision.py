"""Training in a number format.

A pass sees quantised weights through their codes, and gradients go straight through. All passes between two optimiser steps see the
same weights, so these are replaced once a pass and not in each layer: while ``seen`` is open, every weight that the format quantises is
``dequantise(quantise(w))``, and afterwards what was there is there again, for the optimiser and the export. The matrices are
Megatron-Core's, which join several of the checkpoint's; their codes are the checkpoint's where no tile of the format reaches over a
joint or over the edge of a shard, and anything else is refused.

Where the format quantises activations too, TransformerEngine computes with a recipe of its own that quantises both (``recipe``); on a CPU
the inputs of linear layers are rounded here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.format import VALUES, Codec, Format, FormatItself, Parity, Quantizer, bounded
from miles_core.plugin import ConfigError
from miles_megatron.architecture import Architecture
from miles_megatron.families.parts import Entry
from miles_megatron.trainer.dequantised import dequantise_in_two_passes
from miles_megatron.trainer.weights import Weights


class TrainedFormat:
    """The weights of this rank's chunks in a number format.

    Args:
        weights: of the chunks.
        chunks: not wrapped.
        codec: which weights are quantised, and how.

    Raises:
        ConfigError: a matrix is quantised in part, or tiles do not lie inside of its parts.
    """

    def __init__(self, weights: Weights, chunks: list[nn.Module], codec: Codec) -> None:
        self.codec = codec
        self._inside = False
        self._held: list[Tensor] = []
        format = codec.format
        if format is None:
            return
        if format.couple:
            raise ConfigError(
                f"--train-precision {format.name} with --trainer megatron: several weights share its scales, and this trainer "
                "quantises matrix by matrix; train with --trainer embedded"
            )
        shapes = weights.checkpoint_shapes()
        # TransformerEngine quantises every linear layer of the decoder inside of its recipe, and knows no names
        self._inside = torch.cuda.is_available() and format.quantizes_activations
        if self._inside:
            _quicken()
        for entry in (e for e in weights.entries if e.name in weights.held):
            held = weights.held[entry.name]
            if held.dim() != 2:
                continue
            if self._inside and ".linear_" in entry.name and not _chosen(entry, codec, shapes):
                raise ConfigError(
                    f"{entry.checkpoint[0]} would stay in BF16 in the engine, and TransformerEngine computes every linear layer in "
                    f"{format.name}: leave {format.skip_origin} out, or train with --trainer embedded"
                )
            if _chosen(entry, codec, shapes):
                why = misfit(entry, weights.a, tuple(held.shape), weights.is_cut(entry, held), format.tile)
                if why:
                    raise ConfigError(f"{entry.checkpoint[0]} cannot be trained in {format.name} like this: {why}")
                self._held.append(held)
        if format.quantizes_activations and not self._inside:
            _round_inputs(chunks, {id(t) for t in self._held}, format)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """While this is open, quantised weights are what their codes mean; not where TransformerEngine sees to it."""
        format = self.codec.format
        if format is None or self._inside:
            yield
            return
        kept = [held.detach().clone() for held in self._held]
        with torch.no_grad():
            for held in self._held:
                held.copy_(format.dequantize(format.quantize(held.bfloat16())))
        try:
            yield
        finally:
            with torch.no_grad():
                for held, before in zip(self._held, kept, strict=True):
                    held.copy_(before)

    def quantizer(self, format: Format) -> Quantizer | None:
        """See ``Trainer.quantizer``."""
        if not torch.cuda.is_available() or not format.quantizes_activations:
            return FormatItself(format)
        return CODES[format.name](format) if format.name in CODES else None


def _quicken() -> None:
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import _FromFloat8BlockwiseFunc

    dequantise_in_two_passes(_FromFloat8BlockwiseFunc)


def _chosen(entry: Entry, codec: Codec, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the format applies to a matrix; ConfigError where it does to a part of it."""
    found = [codec.quantises(name, shapes[name]) for name in entry.checkpoint]
    if entry.layout.startswith("stacked") and codec.experts(entry.checkpoint[0], shapes[entry.checkpoint[0]]):
        raise ConfigError(
            f"{entry.checkpoint[0]} joins all experts, which --trainer megatron does not train in a number format"
        )
    if len(set(found)) > 1:
        left = [name for name, yes in zip(entry.checkpoint, found, strict=True) if not yes]
        raise ConfigError(
            f"{', '.join(left)} would stay in BF16 and its neighbours would not; in Megatron-Core's model they are one matrix, "
            f"{entry.name}: leave all of them alone or none"
        )
    return found[0]


def misfit(entry: Entry, a: Architecture, shape: tuple[int, ...], cut: bool, tile: tuple[int, int]) -> str | None:
    """Why tiles of this rank's part of a matrix are not those of the checkpoint's matrices; None where they are.

    Args:
        entry: which one.
        a: the model.
        shape: [rows, columns] here.
        cut: other ranks have other parts of it.
        tile: rows and columns that share a scale.
    """
    rows, columns = tile
    if entry.layout == "qkv" and a.head_dim % rows:
        return f"heads of {a.head_dim} rows lie between those of other projections, and a tile has {rows}"
    joint = shape[0] // 2 if entry.layout == "gate_up" else shape[0]
    if (entry.layout == "gate_up" or (cut and entry.axis == 0)) and joint % rows:
        return (
            f"each rank has {joint} rows of it, which do not divide into tiles of {rows}: other parallel sizes may fit"
        )
    if cut and entry.axis == 1 and shape[1] % columns:
        return f"each rank has {shape[1]} columns of it, which do not divide into tiles of {columns}: other parallel sizes may fit"
    return None


def _round_inputs(chunks: list[nn.Module], quantised: set[int], format: Format) -> None:
    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_Rounded.apply(args[0], format), *args[1:])

    for module in (m for chunk in chunks for m in chunk.modules()):
        if id(getattr(module, "weight", None)) in quantised:
            module.register_forward_pre_hook(before)


class _Rounded(torch.autograd.Function):
    """x as the format's products read it; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: Format) -> Tensor:
        return format.fake_quantize_activation(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class TransformerEngineCodes(Quantizer):
    """TransformerEngine's own code for a format that it has a recipe for."""

    def __init__(self, format: Format) -> None:
        self._tile = format.tile

    def weight(self, weight: Tensor) -> dict[str, Tensor]:
        """See ``Quantizer.weight``."""
        rows, columns = (-(-size // tile) for size, tile in zip(weight.shape, self._tile, strict=True))
        found = self._made(weight, weights=True)
        codes = found._rowwise_data.view(torch.float8_e4m3fn)[: weight.shape[0], : weight.shape[1]]
        scales = found._rowwise_scale_inv[:rows, :columns]
        return {"weight": codes.to(weight.device), "weight_scale_inv": scales.to(weight.device)}

    def activation(self, x: Tensor) -> Tensor:
        """See ``Quantizer.activation``."""
        return self._made(x, weights=False).dequantize(dtype=torch.float32).to(x)

    def _made(self, x: Tensor, weights: bool) -> Any:
        return self._quantizer(weights)(x.cuda().bfloat16().contiguous())

    @abstractmethod
    def _quantizer(self, weights: bool) -> Any:
        """TransformerEngine's, for weights or for activations."""


class Blocks(TransformerEngineCodes):
    """Blocks of 128 x 128 weights and 1 x 128 activations.

    The quotient is a product with the reciprocal in places, which moves a few codes in ten thousand by one step. On an H200 the probes
    differed by 4.6e-3 (weights) and 2.2e-3 (activations); the format's own rounding is 2.7e-2.
    """

    weights: Parity = bounded(8e-3)
    activations: Parity = bounded(8e-3)

    def _quantizer(self, weights: bool) -> Any:
        from transformer_engine.common.recipe import Float8BlockScaling
        from transformer_engine.pytorch.constants import DType
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

        recipe = Float8BlockScaling()
        chosen = recipe.fp8_quant_fwd_weight if weights else recipe.fp8_quant_fwd_inp
        return Float8BlockQuantizer(
            DType.kFloat8E4M3,
            rowwise=True,
            columnwise=False,
            amax_epsilon=chosen.amax_epsilon,
            force_pow_2_scales=chosen.power_2_scale,
            block_scaling_dim=2 if weights else 1,
        )


class Microscaling(TransformerEngineCodes):
    """Blocks of 1 x 32 with power-of-two scales; from Blackwell on."""

    weights: Parity = VALUES
    activations: Parity = VALUES

    def _quantizer(self, weights: bool) -> Any:
        from transformer_engine.pytorch.constants import DType
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

        return MXFP8Quantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)


#: Number format -> TransformerEngine's code for it; the keys are those of ``RECIPES``.
CODES: dict[str, type[TransformerEngineCodes]] = {"fp8": Blocks, "mxfp8": Microscaling}
