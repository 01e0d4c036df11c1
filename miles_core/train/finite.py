"""Checks that weights are finite before a checkpoint is written, so that an unusable checkpoint never replaces a usable one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, distributed

from miles_core.contracts.trainer import Trainer
from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import NonFiniteError

#: Number of norms that are computed between two synchronisations with the device.
SYNC_EVERY = 256


def check_finite(trainer: Trainer, step: int) -> None:
    """Check the weights of all ranks after ``step`` completed steps. This is a collective: all ranks raise or none does.

    Raises:
        NonFiniteError: names the first weight that holds NaN or infinity.
    """
    weight = first_nonfinite(trainer.units())
    if trainer.world.size > 1 and distributed.is_initialized():
        reports: list[str | None] = [None] * distributed.get_world_size()
        distributed.all_gather_object(reports, weight)
        weight = next((name for name in reports if name), None)
    if weight is not None:
        raise NonFiniteError(
            f"step {step} is not saved: its weight {weight} holds NaN or infinity. Earlier checkpoints are unchanged: continue from one of "
            "them with a lower --lr or --clip-grad"
        )


def first_nonfinite(units: Iterable[WeightUnit]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, else None. Consumes all ``units``."""
    names: list[str] = []
    norms: list[Tensor] = []
    first: str | None = None
    for name, tensor in _select_floating(units):
        names.append(name)
        norms.append(torch.linalg.vector_norm(tensor.detach(), ord=float("inf"), dtype=torch.float32))
        if len(norms) == SYNC_EVERY:
            first = first or _find_first(names, norms)
            names, norms = [], []
    return first or _find_first(names, norms)


def _select_floating(units: Iterable[WeightUnit]) -> Iterator[tuple[str, Tensor]]:
    for unit in units:
        for name, tensor in unit.tensors.items():
            if tensor.is_floating_point() and tensor.numel():
                yield name, tensor


def _find_first(names: list[str], norms: list[Tensor]) -> str | None:
    if not norms:
        return None
    finite = torch.stack(norms).isfinite().tolist()
    return next((name for name, good in zip(names, finite, strict=True) if not good), None)
