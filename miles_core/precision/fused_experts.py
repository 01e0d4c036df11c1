"""Experts that a checkpoint stores in one tensor.

Most families have a matrix for each expert and projection, and that is also what engines read from a quantised
checkpoint: ``experts.7.gate_proj.weight``, with its scales beside it. Some families join them in BF16: every expert's
gate and up in ``experts.gate_up_proj``, every down in ``experts.down_proj``. Blocks of a number format run along K, the
input features, and each expert is quantised apart, gate apart from up; so joined tensors are taken apart before they are
quantised, and put together again when a checkpoint is dequantised. Which rows are gate and which way round an expert is
stored cannot be seen from a shape, so families are listed by name and any other is refused. Biases stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_core.errors import CheckpointError


@dataclass(frozen=True)
class Joining:
    """How a family joins its experts.

    Attributes:
        transposed: an expert is [inputs, outputs]: gate_up_proj [E, H, 2I] and down_proj [E, I, H], not [E, 2I, H] and
            [E, H, I].
        interleaved: the outputs of gate and up take turns; otherwise all of gate come first.
        caution: what users of a quantised checkpoint should know.
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

#: ``model_type`` -> how its published checkpoints join experts.
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
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class Family:
    """What must be known of a model to take its experts apart.

    Attributes:
        model_type: as in its configuration; of its language model where only that joins experts.
        hidden: the model's width, which tells the two ways round apart where a family is found in both; 0 unknown.
    """

    model_type: str = ""
    hidden: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Family:
        """From a ``config.json``."""
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else {}
        names = [str(part.get("model_type", "")) for part in (config, text)]
        hidden = config.get("hidden_size") or text.get("hidden_size") or 0
        return cls(next((n for n in names if n in JOININGS), names[0]), int(hidden))

    @property
    def joining(self) -> Joining | None:
        """How it joins experts; None when it does not, or nobody knows."""
        return JOININGS.get(self.model_type)


@dataclass(frozen=True)
class Expert:
    """The matrix of one expert inside a joined tensor.

    Attributes:
        name: as a tensor of its own.
        shape: [outputs, inputs].
        source: the joined tensor.
        index: which expert.
        half: 0 gate, 1 up, None the whole slab.
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
        """Strides and offset (elements) of the matrix in its expert's slab, which has ``stride``."""
        row, column = (stride[1], stride[0]) if self.transposed else (stride[0], stride[1])
        if self.half is None:
            return (row, column), 0
        if self.interleaved:
            return (2 * row, column), self.half * row
        return (row, column), self.half * self.shape[0] * row

    def of(self, slab: Tensor) -> Tensor:
        """The matrix, a view of its expert's slab ``source[index]``."""
        stride, offset = self.within(slab.stride())
        return slab.as_strided(self.shape, stride, slab.storage_offset() + offset)


def is_joined(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a checkpoint tensor holds all experts of a layer."""
    return len(shape) > 2 and "experts" in name


def take_apart(name: str, shape: tuple[int, ...], family: Family) -> list[Expert]:
    """The matrices in a joined tensor: expert by expert, gate before up.

    Raises:
        CheckpointError: a family, a name or a shape that is not known.
    """
    found, joining = _JOINED.fullmatch(name), family.joining
    if joining is None or found is None or len(shape) != 3:
        raise CheckpointError(
            f"{name} {list(shape)} holds all experts of a layer, and how model_type {family.model_type!r} joins them is "
            f"not known (known: {', '.join(sorted(JOININGS))}, with experts.gate_up_proj and experts.down_proj); use a "
            "checkpoint with a tensor for each expert, or leave the experts alone"
        )
    stem, down = found[1], found[2] == DOWN
    transposed = _transposed(name, shape, family, joining, down)
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


def _transposed(name: str, shape: tuple[int, ...], family: Family, joining: Joining, down: bool) -> bool:
    """Whether this tensor is stored transposed: as the family does, unless only the other way fits the model's width.

    Transformers saves qwen3_vl_moe the other way round than its published checkpoints are."""
    if not family.hidden:
        return joining.transposed
    fits = {way: shape[1 if way != down else 2] == family.hidden for way in (True, False)}
    if not any(fits.values()):
        raise CheckpointError(
            f"{name} {list(shape)} does not fit the model's hidden_size of {family.hidden} either way round; "
            "config.json and weights are of different models"
        )
    return joining.transposed if fits[joining.transposed] else not joining.transposed


@dataclass(frozen=True)
class Joined:
    """A joined tensor to be made: ``members[e]`` are the matrices of expert e, gate before up."""

    name: str
    shape: tuple[int, int, int]
    members: tuple[tuple[str, ...], ...]
    joining: Joining

    def slab(self, matrices: list[Tensor]) -> Tensor:
        """The slab of one expert from its members."""
        if len(matrices) > 1:
            whole = torch.stack(matrices, 1).flatten(0, 1) if self.joining.interleaved else torch.cat(matrices)
        else:
            whole = matrices[0]
        return whole.T.contiguous() if self.joining.transposed else whole


def put_together(shapes: dict[str, tuple[int, ...]], family: Family) -> list[Joined]:
    """The joined tensors that this family's own checkpoints have in place of single experts' matrices.

    Args:
        shapes: plain names and shapes of all tensors.

    Raises:
        CheckpointError: an expert is missing.
    """
    joining = family.joining
    if joining is None:
        return []
    count: dict[str, int] = {}
    for name in shapes:
        if found := _SINGLE.fullmatch(name):
            count[found[1]] = max(count.get(found[1], 0), int(found[2]) + 1)
    made = []
    for stem, experts in count.items():
        for joined, parts in ((GATE_UP, ("gate_proj", "up_proj")), (DOWN, ("down_proj",))):
            members = tuple(tuple(f"{stem}.{e}.{part}.weight" for part in parts) for e in range(experts))
            lost = next((m for group in members for m in group if m not in shapes), None)
            if lost is not None:
                raise CheckpointError(f"{lost} is missing: {stem} has {experts} experts elsewhere in the checkpoint")
            rows = sum(shapes[m][0] for m in members[0])
            columns = shapes[members[0][0]][1]
            shape = (experts, columns, rows) if joining.transposed else (experts, rows, columns)
            made.append(Joined(f"{stem}.{joined}", shape, members, joining))
    return made
