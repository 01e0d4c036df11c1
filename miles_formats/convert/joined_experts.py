"""Joins the experts of families whose checkpoints store them in one tensor, the inverse of ``split_experts``."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.errors import CheckpointError
from miles_formats.fused_experts import DOWN, GATE_UP, Family, Joining

_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class Joined:
    """A joined tensor to create: ``members[e]`` are the matrices of expert e, gate before up."""

    name: str
    shape: tuple[int, int, int]
    members: tuple[tuple[str, ...], ...]
    joining: Joining

    def slab(self, matrices: list[Tensor]) -> Tensor:
        """Build the slab of one expert from its matrices."""
        if len(matrices) > 1:
            whole = torch.stack(matrices, 1).flatten(0, 1) if self.joining.interleaved else torch.cat(matrices)
        else:
            whole = matrices[0]
        return whole.T.contiguous() if self.joining.transposed else whole


def put_together(shapes: dict[str, tuple[int, ...]], family: Family) -> list[Joined]:
    """Return the joined tensors that this family's checkpoints have instead of separate experts.

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
