"""The contract of a number format.

One object per format serves the trainer's forward, the weight export, the engine and the checkpoint converter, so
that all of them hold the same bytes. A format defines how one weight matrix is stored. Core derives from it the trainer's fake-quantised
forward, the tensors of a weight sync and of the engine (``precision.codec``), the selection of weights (``precision.selector``), and the
test suite of a format (``testing.FormatContract``).

A weight is a matrix [N, K] in the layout of the checkpoint: a row per output feature, blocks along K. Core encodes the BF16 model
copy of the weight (``Codec`` rounds other dtypes), never an FP32 master copy; arithmetic is FP32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from miles_core.precision.product import NoProduct, Product

if TYPE_CHECKING:
    from miles_core.config.config import Config

#: Suffix of a stored tensor -> the tensor; see ``Stored``.
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Stored:
    """One of the tensors as which a weight is stored. ``X.weight`` is stored as ``X.<suffix>`` for each suffix."""

    suffix: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Format(ABC):
    """A number format: defines how weights are stored. Instances are immutable and hold no weights.

    Attributes:
        name: as in ``--rollout-precision``.
        tile: (rows, columns) of the block that shares one scale. A shard may cut a weight only between tiles.
        couple: groups of sibling projections that are encoded with common ``stats``, as in
            ``(("gate_proj", "up_proj"),)``; one member without the others is an error, except in models that lack the first everywhere.
        exact: quantising the dequantised FP32 values again gives the same bytes; False if only the values are the same.
        shows: suffix of the part that is not finite if the weight is not, so that only this smaller tensor is checked; "" if none.
        together: recommended number of weights per ``quantize_all`` on a GPU, for a format without ``couple``; 1 disables batching.
        error: relative RMS error of the round trip on N(0, 1), rounded up; the format's tests enforce this bound.
        only: selectors of the weights to which the format applies, such as experts; empty for every matrix.
        only_origin: reason for the limit ``only``, for messages.
        skip: selectors of weights that the user excludes, in addition to those always excluded (``precision.selector``).
        skip_origin: the flag that set ``skip``, for messages.
    """

    name: str
    tile: tuple[int, int]
    couple: tuple[tuple[str, ...], ...] = ()
    exact: bool = True
    shows: str = ""
    together: int = 1
    error: float
    only: tuple[str, ...] = ()
    only_origin: str = "the weights the format is for"
    skip: tuple[str, ...] = ()
    skip_origin: str = "the list of weights to leave alone"

    @classmethod
    def from_config(cls, config: Config) -> Format:
        """Create the format with this run's options; a format with options overrides this."""
        return cls()

    def refuse(self, shape: tuple[int, int]) -> str | None:
        """Return why a weight of this shape cannot be stored, with the sizes that can be; None if it can be stored.

        The text continues the sentence ``NAME [N, K] cannot be stored as FORMAT: ...``."""
        return None

    def caution(self, shape: tuple[int, int]) -> str | None:
        """Return a warning for users who convert a checkpoint with a weight of this shape; None if there is none.

        The text continues the sentence ``NAME [N, K] as FORMAT: ...``."""
        return None

    @abstractmethod
    def storage(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        """Return the specification of the tensors as which a weight [N, K] is stored."""

    def stats(self, weight: Tensor) -> Tensor | None:
        """Compute the FP32 statistics of the whole weight that ``quantize`` needs; None if tiles are independent.

        Core takes the elementwise maximum over coupled weights and over shards before it quantises them."""
        return None

    @abstractmethod
    def quantize(self, weight: Tensor, stats: Tensor | None = None, out: Parts | None = None) -> Parts:
        """Quantise a weight [N, K]; return suffix -> tensor, as declared by ``storage``. Core rejects the result of a non-finite weight.

        Args:
            weight: any floating dtype, read as FP32; may be a strided view.
            stats: reduced ``stats``; None to compute those of this weight.
            out: write to these tensors and return them, instead of allocating new ones.
        """

    def quantize_all(self, weights: Sequence[Tensor], outs: Sequence[Parts | None]) -> list[Parts]:
        """Call ``quantize`` for several weights with their ``out``. A format that can process them in one launch overrides this."""
        return [self.quantize(weight, out=out) for weight, out in zip(weights, outs, strict=True)]

    def make_writer(self, weights: Sequence[Tensor], outs: Sequence[Parts]) -> Callable[[], None]:
        """Return a function that writes ``quantize`` of the weights' current values to ``outs``, once per weight sync. All tensors stay in their
        memory. A format that can prepare its kernel launches overrides this."""

        def write() -> None:
            self.quantize_all(weights, outs)

        return write

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Dequantise parts (suffix -> tensor) to the exact values of the codes, FP32 [N, K]."""

    def dequantize_all(self, parts: Sequence[Mapping[str, Tensor]], outs: Sequence[Tensor]) -> None:
        """Write the values of several weights to ``outs``, rounded to their dtype. A format that can process them in one launch overrides this."""
        for part, out in zip(parts, outs, strict=True):
            out.copy_(self.dequantize(part))

    def dequantize_stacked(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        """Write the values of weights that are stored together to ``out`` [count, N, K], rounded to its dtype.

        Args:
            parts: as ``storage``, with a first dimension of ``count``.
            out: any strides. A format whose tiles are independent may decode all rows in one launch and overrides this.
        """
        self.dequantize_all([{s: t[i] for s, t in parts.items()} for i in range(len(out))], list(out.unbind(0)))

    def fake_quantize_stacked(self, weights: Tensor, out: Tensor) -> Tensor | None:
        """Write ``dequantize(quantize(weight))`` of weights that are stored together to ``out``, in one launch, for a trainer that does not
        need the codes. For formats whose tiles are independent.

        Args:
            weights: [count, N, K], any strides.
            out: the same shape and dtype, any strides.

        Returns:
            the part ``shows`` of each weight, [count, ...]; None if there is no such kernel, and nothing was written.
        """
        return None

    def fake_quantize_activation(self, x: Tensor) -> Tensor:
        """Quantise and dequantise x [..., K], the input of a linear layer, in blocks along K; return it in x's dtype.

        A token's result never depends on other tokens. A weight-only format returns ``x``. A block (or token) with NaN or Inf becomes
        NaN; it is not rejected, because the tensor has no name to report."""
        return x

    @property
    def quantizes_activations(self) -> bool:
        """Whether the input of a quantised layer is quantised too, that is, ``fake_quantize_activation`` is overridden."""
        return type(self).fake_quantize_activation is not Format.fake_quantize_activation

    def product(self, device: torch.device, dtype: torch.dtype) -> Product:
        """Return the native matrix product of this format's codes on ``device``, with results in ``dtype``. A format that has one
        overrides this.

        Raises:
            NoProduct: no native product is available; the message gives the reason."""
        raise NoProduct(f"{self.name} has no native product; dequantised codes are multiplied on every device")

    @abstractmethod
    def config(self, unquantized: list[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` block of config.json. ``unquantized``: names of modules that are not quantised."""

    def files(self, unquantized: list[str]) -> dict[str, dict[str, Any]]:
        """Return additional JSON files of a checkpoint, name -> content. ``unquantized``: as for ``config``."""
        return {}

    @classmethod
    def recognises(cls, block: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint's ``quantization_config`` block describes this format, with options that ``from_checkpoint``
        supports. A format whose ``quant_method`` differs from its name overrides this."""
        return block.get("quant_method") == cls.name

    @classmethod
    def from_checkpoint(cls, block: Mapping[str, Any]) -> Format:
        """Create the format with the options of a checkpoint's ``quantization_config`` block, which ``recognises`` accepted."""
        return cls()

    def nbytes(self, shape: tuple[int, int]) -> int:
        """Return the size in bytes of a stored weight [N, K]."""
        return sum(stored.nbytes for stored in self.storage(shape))

    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the tensors as which a weight is stored."""
        return tuple(stored.suffix for stored in self.storage((4096, 4096)))

    def shape_of(self, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        """Infer a weight's [N, K] from its stored shapes (suffix -> shape); None if no weight has these shapes.

        Codes may be packed, so K is tried for code sizes of 1 to 32 bits."""
        first = self.storage((4096, 4096))[0]
        if len(stored.get(first.suffix, ())) != 2:
            return None
        rows, columns = stored[first.suffix]
        bits = 8 * first.dtype.itemsize
        for shape in ((rows, columns * bits // b) for b in range(1, bits + 1) if columns * bits % b == 0):
            if all(tuple(stored.get(s.suffix, ())) == s.shape for s in self.storage(shape)):
                return shape
        return None


def part_name(name: str, suffix: str) -> str:
    """Return the stored name of a part: ``X.weight`` with ``weight_scale_inv`` gives ``X.weight_scale_inv``."""
    return f"{name.rpartition('.')[0]}.{suffix}"


def store(parts: Parts, out: Parts | None) -> Parts:
    """Return ``parts``, or copy them to ``out`` and return that; for the last line of a ``quantize``."""
    if out is None:
        return parts
    for suffix, tensor in parts.items():
        if out[suffix] is not tensor:
            out[suffix].copy_(tensor)
    return out
