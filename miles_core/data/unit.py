"""What travels at a weight sync.

A trainer yields ``Unit``s: full, unsharded tensors under their checkpoint names and in the checkpoint's layout, in a
deterministic order. Tensors that a number format must encode together (gate and up of one expert) share a unit. Core
encodes units with the run's format and hands ``Encoded`` to the transport.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Unit:
    """Tensors of the model copy, checkpoint name -> tensor. Storage may be reused after the iterator moves on, unless they are
    ``lasting``: views of the trainer's own parameters, which stay where they are and which its next step changes."""

    tensors: dict[str, Tensor]
    lasting: bool = False


@dataclass
class Encoded:
    """One checkpoint tensor as stored: ``name`` is the plain name (``...q_proj.weight``), ``parts`` maps stored names
    (``...q_proj.weight``, ``...q_proj.weight_scale_inv``) to tensors, ``format`` is a format's name or "" for as is, ``lasting``
    as for ``Unit``."""

    name: str
    parts: dict[str, Tensor] = field(default_factory=dict)
    format: str = ""
    lasting: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return sum(t.numel() * t.element_size() for t in self.parts.values())
