"""Training in a number format.

A pass computes with fake-quantised weights and a straight-through gradient. All passes between two optimizer steps use the same weights,
so the weights are replaced once per pass and not in each layer: inside the context manager ``quantized_weights``, every weight that the
format quantises is ``dequantise(quantise(w))``; at exit the original values are restored for the optimizer and the export. Megatron-Core's
matrices concatenate several matrices of the checkpoint. Their codes equal the checkpoint's if no tile crosses the border between two
matrices or between two shards; other layouts raise ConfigError.

For formats that also quantise activations, TransformerEngine quantises both with its recipe on a GPU (``recipes``); on a CPU this module
rounds the inputs of linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.plugin import ConfigError
from miles_formats import Codec, Format
from miles_megatron.architecture import Architecture
from miles_megatron.families.parts import Entry
from miles_megatron.trainer.dequantised import dequantise_in_two_passes
from miles_megatron.trainer.weights import Weights


class TrainedFormat:
    """Fake quantisation of the weights of this rank's chunks.

    Args:
        weights: weights of the chunks.
        chunks: the chunks, not wrapped.
        codec: determines which weights are quantised, and how.

    Raises:
        ConfigError: only a part of a matrix is quantised, a tile crosses a border, or the trainer does not support the format.
    """

    def __init__(self, weights: Weights, chunks: list[nn.Module], codec: Codec) -> None:
        self.codec = codec
        self.active = codec.format is not None
        self._inside = False
        self._held: list[Tensor] = []
        self._configs: dict[int, tuple[Any, str]] = {}
        format = codec.format
        if format is None:
            return
        if format.couple:
            raise ConfigError(
                f"--train-precision {format.name} with --trainer megatron: several weights share its scales, and this trainer "
                "quantises matrix by matrix; train with --trainer embedded"
            )
        shapes = weights.checkpoint_shapes()
        # TransformerEngine's recipe quantises every linear layer of the decoder, whatever its name
        self._inside = torch.cuda.is_available() and format.quantizes_activations
        if self._inside:
            _speed_up_dequantisation()
            # some modules have a copy of the configuration
            configs: list[Any] = [getattr(m, "config", None) for chunk in chunks for m in chunk.modules()]
            self._configs = {id(c): (c, c.fp8) for c in configs if getattr(c, "fp8", None)}
        for entry in (e for e in weights.entries if e.name in weights.held):
            held = weights.held[entry.name]
            if held.dim() != 2:
                continue
            if self._inside and entry.is_matrix and not _is_quantised(entry, codec, shapes):
                raise ConfigError(
                    f"{entry.checkpoint[0]} would stay in BF16 in the engine, but TransformerEngine computes every linear layer in "
                    f"{format.name}: leave {format.skip_origin} out, or train with --trainer embedded"
                )
            if _is_quantised(entry, codec, shapes):
                why = misfit(entry, weights.a, tuple(held.shape), weights.is_cut(entry, held), format.tile)
                if why:
                    raise ConfigError(f"{entry.checkpoint[0]} cannot be trained in {format.name} like this: {why}")
                self._held.append(held)
        if format.quantizes_activations and not self._inside:
            self._round_inputs(chunks, format)

    def switch(self, precision: str) -> None:
        """See ``Trainer.rebuild``. TransformerEngine quantises in the passes whose configuration names a recipe.

        Raises:
            ValueError: the precision is neither ``bf16`` nor the format of this trainer.
        """
        mine = self.codec.format.name if self.codec.format is not None else "bf16"
        if precision not in ("bf16", mine):
            raise ValueError(f"this trainer supports bf16 and {mine}, not {precision}")
        self.active = precision != "bf16"
        for config, fp8 in self._configs.values():
            config.fp8 = fp8 if self.active else None

    @contextmanager
    def quantized_weights(self) -> Iterator[None]:
        """Replace quantised weights by their dequantised codes inside the context. Does nothing if TransformerEngine quantises."""
        format = self.codec.format
        if format is None or self._inside or not self.active:
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

    def _round_inputs(self, chunks: list[nn.Module], format: Format) -> None:
        quantised = {id(held) for held in self._held}

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            return (_FakeQuantize.apply(args[0], format), *args[1:]) if self.active else None

        for module in (m for chunk in chunks for m in chunk.modules()):
            if id(getattr(module, "weight", None)) in quantised:
                module.register_forward_pre_hook(before)


def _speed_up_dequantisation() -> None:
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import _FromFloat8BlockwiseFunc

    dequantise_in_two_passes(_FromFloat8BlockwiseFunc)


def _is_quantised(entry: Entry, codec: Codec, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the format quantises a matrix. Raises ConfigError if it quantises only a part of the matrix."""
    found = [codec.quantises(name, shapes[name]) for name in entry.checkpoint]
    if entry.layout.startswith("stacked") and codec.experts(entry.checkpoint[0], shapes[entry.checkpoint[0]]):
        raise ConfigError(
            f"{entry.checkpoint[0]} stores all experts in one tensor, which --trainer megatron does not train in a number format"
        )
    if len(set(found)) > 1:
        left = [name for name, yes in zip(entry.checkpoint, found, strict=True) if not yes]
        raise ConfigError(
            f"{', '.join(left)} would stay in BF16, but Megatron-Core joins it with quantised weights in one matrix, {entry.name}: "
            "quantise all of them or none"
        )
    return found[0]


def misfit(entry: Entry, a: Architecture, shape: tuple[int, ...], cut: bool, tile: tuple[int, int]) -> str | None:
    """Return why tiles of this rank's shard differ from the tiles of the checkpoint's matrices; None if they are the same.

    Args:
        entry: the matrix.
        a: the architecture.
        shape: [rows, columns] of the shard.
        cut: whether the matrix is split across ranks.
        tile: rows and columns that share a scale.
    """
    rows, columns = tile
    if entry.layout == "qkv" and a.head_dim % rows:
        return f"it interleaves heads of {a.head_dim} rows from several projections, and a tile has {rows} rows"
    if entry.layout == "sections":
        pieces = max(sum(map(sum, entry.sections)) // shape[0], entry.groups)
        parts = sorted({size // pieces for sizes in entry.sections for size in sizes})
        if any(size % rows for size in parts):
            return f"it joins parts of {', '.join(map(str, parts))} rows, which do not divide into tiles of {rows}"
        return None
    joint = shape[0] // 2 if entry.layout == "gate_up" else shape[0]
    if (entry.layout == "gate_up" or (cut and entry.axis == 0)) and joint % rows:
        return (
            f"each rank has {joint} rows of it, which do not divide into tiles of {rows}: other parallel sizes may fit"
        )
    if cut and entry.axis == 1 and shape[1] % columns:
        return f"each rank has {shape[1]} columns of it, which do not divide into tiles of {columns}: other parallel sizes may fit"
    return None


class _FakeQuantize(torch.autograd.Function):
    """Fake-quantise activations with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: Format) -> Tensor:
        return format.fake_quantize_activation(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
