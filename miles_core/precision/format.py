"""The contract of a number format.

One object per format serves the trainer's forward, the weight export, the engine and the checkpoint converter, so
that all of them hold the same bytes. A format says how one weight matrix is stored; what core derives from it: the
trainer's fake-quantised forward, what travels at a weight sync and what the engine computes with (``precision.codec``),
which weights are left alone (``precision.selector``), and the suite a new format must pass (``testing.FormatContract``).

A weight is a matrix [N, K] in the layout of the checkpoint: one row an output feature, blocks along K. What is
encoded is the BF16 model copy of the weight (``Codec`` rounds any other), never an FP32 master kept beside it, and
arithmetic is FP32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from miles_core.precision.product import NoProduct

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.precision.product import Product

#: Suffix of a stored tensor -> the tensor; see ``Stored``.
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Stored:
    """One tensor a weight is stored as. ``X.weight`` is written as ``X.<suffix>``, one for each suffix."""

    suffix: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes it occupies."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Format(ABC):
    """How weights are stored in one number format. Instances are immutable and hold no weights.

    Attributes:
        name: as in ``--rollout-precision``.
        tile: (rows, columns) of the block that shares one scale. A shard may cut a weight only between tiles.
        couple: groups of sibling projections that are encoded with common ``stats``, as in
            ``(("gate_proj", "up_proj"),)``; one member without the others is an error.
        exact: quantising what was dequantised (kept in FP32) gives the same bytes again; False where only the values
            stay the same.
        shows: suffix of the part that is not finite where a weight is not, so that nobody has to look at the weight itself; empty is none.
        together: how many weights ``quantize_all`` is best given on a GPU, of a format without ``couple``; 1 is one by one.
        error: relative RMS error of the round trip on N(0, 1), rounded up: the bound its tests hold the format to.
        only: selectors of the weights the format is for, such as experts; empty is every matrix.
        only_origin: what limits the format to ``only``, for messages.
        skip: selectors of weights the user wants left alone, beside those that always are (``precision.selector``).
        skip_origin: the flag ``skip`` came from, for messages.
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
        """The format as this run's options want it; a format with options overrides this."""
        return cls()

    def refuse(self, shape: tuple[int, int]) -> str | None:
        """Why a weight of this shape cannot be stored, with the sizes that could; None when it can.

        Continues the sentence ``NAME [N, K] cannot be stored as FORMAT: ...``."""
        return None

    def caution(self, shape: tuple[int, int]) -> str | None:
        """What whoever writes a checkpoint with a weight of this shape should know, though it can be stored; None for nothing.

        Continues the sentence ``NAME [N, K] as FORMAT: ...``."""
        return None

    @abstractmethod
    def storage(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        """The tensors a weight [N, K] becomes."""

    def stats(self, weight: Tensor) -> Tensor | None:
        """What ``quantize`` must know of the whole weight, FP32; None when every tile stands for itself.

        Core takes the elementwise maximum over coupled weights and over shards before it quantises any of them."""
        return None

    @abstractmethod
    def quantize(self, weight: Tensor, stats: Tensor | None = None, out: Parts | None = None) -> Parts:
        """weight [N, K], finite or the result is refused, any floating dtype -> suffix -> tensor, as ``storage`` declares.

        Args:
            weight: read in FP32; may be a strided view.
            stats: reduced ``stats``; None takes those of this weight alone.
            out: write into these tensors and return them, instead of making new ones.
        """

    def quantize_all(self, weights: Sequence[Tensor], outs: Sequence[Parts | None]) -> list[Parts]:
        """``quantize`` of each of several weights, in its ``out`` where that is given; a format that makes one launch of them overrides it."""
        return [self.quantize(weight, out=out) for weight, out in zip(weights, outs, strict=True)]

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Suffix -> tensor -> [N, K] FP32: exactly the numbers the codes mean."""

    def fake_quantize_activation(self, x: Tensor) -> Tensor:
        """x [..., K], the input of a linear layer, as its matrix product reads it: quantised and dequantised in blocks
        along K, in x's dtype; a token's result never depends on other tokens. A format of weights only returns ``x``.

        A block (or token) with NaN or Inf comes out as NaN: there is no name to refuse it by here."""
        return x

    @property
    def quantizes_activations(self) -> bool:
        """Whether the input of a quantised layer is quantised too: where ``fake_quantize_activation`` is written."""
        return type(self).fake_quantize_activation is not Format.fake_quantize_activation

    def product(self, device: torch.device, dtype: torch.dtype) -> Product:
        """The matrix product of this format's codes by ``device``'s tensor cores, with results in ``dtype``; a format
        that has one overrides this.

        Raises:
            NoProduct: there is none here, and why."""
        raise NoProduct(f"{self.name} has no product of its own; dequantised codes are multiplied on every device")

    @abstractmethod
    def config(self, unquantized: list[str]) -> dict[str, Any]:
        """The ``quantization_config`` block of config.json. ``unquantized``: names of modules left alone."""

    def files(self, unquantized: list[str]) -> dict[str, dict[str, Any]]:
        """JSON files a checkpoint has beside config.json, name -> content. ``unquantized``: as for ``config``."""
        return {}

    @classmethod
    def recognises(cls, block: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's ``quantization_config`` block says that its weights are stored in this format, with
        options that ``from_checkpoint`` can take over. A format whose ``quant_method`` is not its name overrides this."""
        return block.get("quant_method") == cls.name

    @classmethod
    def from_checkpoint(cls, block: Mapping[str, Any]) -> Format:
        """The format as the checkpoint with this ``quantization_config`` block, which it recognises, was stored."""
        return cls()

    def nbytes(self, shape: tuple[int, int]) -> int:
        """Bytes of a stored weight [N, K]."""
        return sum(stored.nbytes for stored in self.storage(shape))

    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the tensors a weight becomes."""
        return tuple(stored.suffix for stored in self.storage((4096, 4096)))

    def shape_of(self, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        """Suffix -> shape of what a weight was stored as -> the weight's [N, K]; None when no weight is stored so.

        Codes may be packed: K is tried for codes of 1 to 32 bits."""
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
    """``X.weight``, ``weight_scale_inv`` -> ``X.weight_scale_inv``."""
    return f"{name.rpartition('.')[0]}.{suffix}"


def store(parts: Parts, out: Parts | None) -> Parts:
    """``parts``, or ``out`` after they were copied into it: the last line of a ``quantize``."""
    if out is None:
        return parts
    for suffix, tensor in parts.items():
        out[suffix].copy_(tensor)
    return out
