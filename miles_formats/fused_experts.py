"""Experts that a checkpoint stores in one tensor.

Most families have a separate matrix per expert and projection, ``experts.7.gate_proj.weight``, and engines expect this layout in a
quantised checkpoint. Some families join the experts in BF16: gate and up of all experts in ``experts.gate_up_proj``, down in
``experts.down_proj``. Blocks of a number format extend along K, the input features, and each expert's gate and up are quantised
separately. Therefore joined tensors are split before quantisation and joined again when a checkpoint is dequantised. The rows of
gate and the orientation of an expert cannot be inferred from shapes, so supported families are listed by name, and all others are
rejected. Biases are not changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from miles_core.errors import CheckpointError


@dataclass(frozen=True)
class Joining:
    """A family's layout of joined experts.

    Attributes:
        transposed: an expert is [inputs, outputs]: gate_up_proj [E, H, 2I] and down_proj [E, I, H], instead of [E, 2I, H] and
            [E, H, I].
        interleaved: the outputs of gate and up alternate; otherwise all outputs of gate come first.
        caution: warning for users of a quantised checkpoint.
    """

    transposed: bool
    interleaved: bool = False
    caution: str = ""


_GPT_OSS = Joining(
    True,
    interleaved=True,
    caution="production engines read experts of gpt_oss only joined, as its own checkpoints have them: one with quantised "
    "experts can be trained and served here; leave the experts alone to serve it elsewhere",
)

#: ``model_type`` -> layout of joined experts in its published checkpoints.
JOININGS = {
    "gemma4": Joining(False),
    "gemma4_text": Joining(False),
    "gpt_oss": _GPT_OSS,
    "llama4": Joining(True),
    "llama4_text": Joining(True),
    "qwen3_5_moe": Joining(False),
    "qwen3_5_moe_text": Joining(False),
    "qwen3_vl_moe": Joining(True),
    "qwen3_vl_moe_text": Joining(True),
}
GATE_UP, DOWN = "gate_up_proj", "down_proj"
_JOINED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Family:
    """Properties of a model that determine how to split its experts.

    Attributes:
        model_type: from the model's configuration, or from its language model's if only that joins experts.
        hidden: hidden size, which identifies the orientation if a family exists in both; 0 if unknown.
    """

    model_type: str = ""
    hidden: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Family:
        """Create from the content of a ``config.json``."""
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else {}
        names = [str(part.get("model_type", "")) for part in (config, text)]
        hidden = config.get("hidden_size") or text.get("hidden_size") or 0
        return cls(next((n for n in names if n in JOININGS), names[0]), int(hidden))

    @property
    def joining(self) -> Joining | None:
        """The family's layout of joined experts; None if it does not join them or the layout is unknown."""
        return JOININGS.get(self.model_type)


@dataclass(frozen=True)
class Expert:
    """The matrix of one expert inside a joined tensor.

    Attributes:
        name: name as a separate tensor.
        shape: [outputs, inputs].
        source: name of the joined tensor.
        index: index of the expert.
        half: 0 for gate, 1 for up, None for the whole slab.
        transposed, interleaved: as in ``Joining``.
    """

    name: str
    shape: tuple[int, int]
    source: str
    index: int
    half: int | None
    transposed: bool
    interleaved: bool

    def within(self, stride: tuple[int, ...]) -> tuple[tuple[int, int], int]:
        """Return the matrix's strides and its offset in the expert's slab, in elements. ``stride``: strides of the slab."""
        row, column = (stride[1], stride[0]) if self.transposed else (stride[0], stride[1])
        if self.half is None:
            return (row, column), 0
        if self.interleaved:
            return (2 * row, column), self.half * row
        return (row, column), self.half * self.shape[0] * row

    def of(self, slab: Tensor) -> Tensor:
        """Return the matrix as a view of its expert's slab ``source[index]``."""
        stride, offset = self.within(slab.stride())
        return slab.as_strided(self.shape, stride, slab.storage_offset() + offset)


def is_joined(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a checkpoint tensor holds all experts of a layer."""
    return len(shape) > 2 and "experts" in name


def split_experts(name: str, shape: tuple[int, ...], family: Family) -> list[Expert]:
    """Return the matrices in a joined tensor, ordered by expert, gate before up.

    Raises:
        CheckpointError: the family, name or shape is not supported.
    """
    found, joining = _JOINED.fullmatch(name), family.joining
    if joining is None or found is None or len(shape) != 3:
        raise CheckpointError(
            f"{name} {list(shape)} holds all experts of a layer, and how model_type {family.model_type!r} joins them is "
            f"not known (known: {', '.join(sorted(JOININGS))}, with experts.gate_up_proj and experts.down_proj); use a "
            "checkpoint with a tensor for each expert, or leave the experts alone"
        )
    stem, down = found[1], found[2] == DOWN
    transposed = _is_transposed(name, shape, family, joining, down)
    rows, columns = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    if not down and rows % 2:
        raise CheckpointError(f"{name} {list(shape)} should hold gate and up in equal halves of {rows}")
    parts: tuple[tuple[int | None, str], ...] = ((None, "down_proj"),) if down else ((0, "gate_proj"), (1, "up_proj"))
    size = (rows, columns) if down else (rows // 2, columns)
    return [
        Expert(f"{stem}.{e}.{part}.weight", size, name, e, half, transposed, joining.interleaved)
        for e in range(shape[0])
        for half, part in parts
    ]


def _is_transposed(name: str, shape: tuple[int, ...], family: Family, joining: Joining, down: bool) -> bool:
    """Return whether this tensor is stored transposed: as usual for the family, unless only the other orientation fits ``hidden``.

    Transformers saves qwen3_vl_moe in the opposite orientation of its published checkpoints."""
    if not family.hidden:
        return joining.transposed
    fits = {way: shape[1 if way != down else 2] == family.hidden for way in (True, False)}
    if not any(fits.values()):
        raise CheckpointError(
            f"{name} {list(shape)} does not fit the model's hidden_size of {family.hidden} either way round; "
            "config.json and weights are of different models"
        )
    return joining.transposed if fits[joining.transposed] else not joining.transposed
