"""Checkpoints that store all experts of a layer in one tensor.

Most families have a matrix for each expert and projection, and that is also what engines read from a quantised
checkpoint: ``experts.7.gate_proj.weight``, with its scales beside it. Some families join them in BF16: every expert's
gate and up in ``experts.gate_up_proj``, every down in ``experts.down_proj``. Blocks of a number format run along K, the
input features, and each expert is quantised apart; so joined tensors are taken apart before they are quantised, and put
together again when a checkpoint is dequantised. Whether a family stores an expert as [outputs, inputs] or transposed
cannot be seen from a shape, so families are listed by name and any other is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.errors import CheckpointError

#: ``model_type`` -> whether experts are stored transposed: gate_up_proj [E, H, 2I], not [E, 2I, H]; gate comes first.
TRANSPOSED = {
    "llama4": True,
    "llama4_text": True,
    "qwen3_vl_moe": True,
    "qwen3_vl_moe_text": True,
    "qwen3_5_moe": False,
    "qwen3_5_moe_text": False,
}
GATE_UP, DOWN = "gate_up_proj", "down_proj"
_JOINED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class Expert:
    """The matrix of one expert inside a joined tensor.

    Attributes:
        name: as a tensor of its own.
        shape: [outputs, inputs].
        source: the joined tensor.
        index: which expert.
        half: 0 gate, 1 up, None the whole slab.
        transposed: whether the slab is [inputs, outputs].
    """

    name: str
    shape: tuple[int, int]
    source: str
    index: int
    half: int | None
    transposed: bool

    def of(self, slab: Tensor) -> Tensor:
        """The matrix, a view of its expert's slab ``source[index]``."""
        matrix = slab.T if self.transposed else slab
        return matrix if self.half is None else matrix.chunk(2)[self.half]


def is_joined(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a checkpoint tensor holds all experts of a layer."""
    return len(shape) > 2 and "experts" in name


def take_apart(name: str, shape: tuple[int, ...], model_type: str) -> list[Expert]:
    """The matrices in a joined tensor: expert by expert, gate before up.

    Raises:
        CheckpointError: a family, a name or a shape that is not known.
    """
    found = _JOINED.fullmatch(name)
    if model_type not in TRANSPOSED or found is None or len(shape) != 3:
        raise CheckpointError(
            f"{name} {list(shape)} holds all experts of a layer, and how model_type {model_type!r} joins them is not "
            f"known (known: {', '.join(sorted(TRANSPOSED))}, with experts.gate_up_proj and experts.down_proj); "
            "convert from a checkpoint with a tensor for each expert, or leave the experts alone"
        )
    transposed = TRANSPOSED[model_type]
    rows, columns = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    if found[2] == DOWN:
        return [
            Expert(f"{found[1]}.{e}.down_proj.weight", (rows, columns), name, e, None, transposed)
            for e in range(shape[0])
        ]
    if rows % 2:
        raise CheckpointError(f"{name} {list(shape)} should hold gate and up in equal halves of {rows}")
    return [
        Expert(f"{found[1]}.{e}.{part}.weight", (rows // 2, columns), name, e, half, transposed)
        for e in range(shape[0])
        for half, part in enumerate(("gate_proj", "up_proj"))
    ]


@dataclass(frozen=True)
class Joined:
    """A joined tensor to be made: ``members[e]`` are the matrices of expert e, gate before up."""

    name: str
    shape: tuple[int, int, int]
    members: tuple[tuple[str, ...], ...]
    transposed: bool

    def slab(self, matrices: list[Tensor]) -> Tensor:
        """The slab of one expert from its members."""
        whole = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
        return whole.T.contiguous() if self.transposed else whole


def put_together(shapes: dict[str, tuple[int, ...]], model_type: str) -> list[Joined]:
    """The joined tensors that this family's own checkpoints have in place of single experts' matrices.

    Args:
        shapes: plain names and shapes of all tensors.

    Raises:
        CheckpointError: an expert is missing.
    """
    if model_type not in TRANSPOSED:
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
            shape = (experts, columns, rows) if TRANSPOSED[model_type] else (experts, rows, columns)
            made.append(Joined(f"{stem}.{joined}", shape, members, TRANSPOSED[model_type]))
    return made
