"""Data types of a weight sync.

A trainer yields ``WeightUnit``s: full, unsharded tensors under their checkpoint names and in the checkpoint's layout, in a
deterministic order. Tensors that a number format must encode together (gate and up of one expert) share a unit. Core
encodes units with the run's format and hands ``Encoded`` to the transport.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from miles_core.errors import describe


@dataclass
class WeightUnit:
    """Tensors of the model copy, checkpoint name -> tensor. Their storage may be reused when the iterator advances, unless they are
    ``lasting``: views of the trainer's parameters, which keep their addresses and change only with the next training step."""

    tensors: dict[str, Tensor]
    lasting: bool = False

    def find_fault(self) -> str:
        """Describe what is not a named tensor; "" if the unit holds only named tensors, at least one."""
        if not isinstance(self.tensors, dict) or not self.tensors:
            return f"WeightUnit.tensors is {describe(self.tensors)}; expected a dict of checkpoint name -> Tensor"
        for name, tensor in self.tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                return (
                    f"WeightUnit.tensors[{name!r}] is {describe(tensor)}; expected a Tensor under its checkpoint name"
                )
        return ""

    def describe_shapes(self) -> dict[str, str]:
        """Return checkpoint name -> kind of number and shape, as in "float [4, 8]"."""
        kinds = {True: "float", False: "integer"}
        return {name: f"{kinds[t.is_floating_point()]} {list(t.shape)}" for name, t in self.tensors.items()}


@dataclass
class Encoded:
    """One checkpoint tensor as stored.

    Copy parts with ``copy(to, part)`` instead of ``to.copy_(part)``: it may verify received data in the same pass. The data is in ``to`` once
    the stream has been read to its end.

    Attributes:
        name: the plain name (``...q_proj.weight``).
        parts: stored names (``...q_proj.weight``, ``...q_proj.weight_scale_inv``) -> tensors.
        format: a format's name, or "" for as is.
        lasting: as for ``WeightUnit``; lasting codes change only with the next sync.
        source: the trainer's weight, if a repeated encoding writes these codes (``Codec.repeat``).
    """

    name: str
    parts: dict[str, Tensor] = field(default_factory=dict)
    format: str = ""
    lasting: bool = False
    copy: Callable[[Tensor, Tensor], object] = field(default=Tensor.copy_, repr=False, compare=False)
    source: Tensor | None = field(default=None, repr=False, compare=False)

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes to transfer."""
        return sum([t.nbytes for t in self.parts.values()])
