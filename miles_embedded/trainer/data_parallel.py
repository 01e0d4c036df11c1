"""Data-parallel training: several processes, each with its own samples.

Gradients are summed over processes and never averaged, because losses are already divided by the totals of the whole step. A trainer
communicates through one object: ``Alone`` for a single process, ``Replicated`` with a full copy of the model per process, and
``FullyShard`` (``fully_shard``) with a shard of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles_core.contracts.trainer import Context, Forward, Output
from miles_core.data.batch import Batch, add
from miles_core.data.weight_unit import WeightUnit
from miles_core.data.world import ALONE, World


def add_pairs(totals: dict[str, tuple[Tensor, Tensor]], pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Add the (sum, weight) pairs of one micro-batch to those of the step, in float64."""
    values = [torch.as_tensor(value).detach().reshape(()) for pair in pairs.values() for value in pair]
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, value in enumerate(values):
        alike.setdefault((value.dtype, value.device), []).append(number)
    for numbers in alike.values():  # a launch each, not one for each number
        exact = torch.stack([values[n] for n in numbers]).double().unbind()
        for number, value in zip(numbers, exact, strict=True):
            values[number] = value
    add(totals, dict(zip(pairs, zip(values[::2], values[1::2], strict=True), strict=True)))


#: Elements per all-reduce; smaller gradients are combined up to this size.
BUCKET = 1 << 24


class Alone:
    """Strategy for a single process, and interface of the other strategies."""

    #: whether ranks must make the same number of forward calls, because each call is a collective operation
    in_step = False

    def __init__(self, world: World = ALONE) -> None:
        self.world = world

    def shard(self, model: nn.Module) -> None:
        """Shard ``model``, which is complete in every process; by default keep all of it."""

    def call(self, forward: Forward, model: nn.Module, micro_batch: Batch, ctx: Context) -> Output:
        """Call ``forward`` for one micro-batch."""
        return forward(model, micro_batch, ctx)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over processes; returns the result on the device of ``value``."""
        return value

    def max_count(self, count: int) -> int:
        """Return the maximum of all processes' counts."""
        return count

    def first_text(self, text: str) -> str:
        """Return the first non-empty text in rank order; "" if all are empty."""
        return text

    def sum_gradients(self, masters: Iterable[Tensor]) -> None:
        """Replace every ``grad`` by the sum over processes; a missing gradient counts as zero if another process has one."""

    def square_norm(self, value: Tensor) -> Tensor:
        """Return the squared norm of all gradients, given that of the gradients this process steps."""
        return value


class Replicated(Alone):
    """Every process has the full model and makes the same optimizer steps.

    Args:
        world: rank and size of this process in torch.distributed's default group.
        device: device of the model, used for the communication.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        super().__init__(world)
        self.device = device

    def sum(self, value: Tensor) -> Tensor:
        """See ``Alone.sum``."""
        total = value.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(value.device)

    def max_count(self, count: int) -> int:
        """See ``Alone.max_count``."""
        largest = torch.tensor(count, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def first_text(self, text: str) -> str:
        """See ``Alone.first_text``."""
        texts: list[Any] = [None] * self.world.size
        dist.all_gather_object(texts, text)
        return next((f"{found} on rank {rank}" for rank, found in enumerate(texts) if found), "")

    def sum_gradients(self, masters: Iterable[Tensor]) -> None:
        """See ``Alone.sum_gradients``."""
        every = list(masters)
        present = self.sum(torch.tensor([m.grad is not None for m in every], dtype=torch.int32)).bool().tolist()
        moving = [m for m, anywhere in zip(every, present, strict=True) if anywhere]
        for master in moving:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        for bucket in _buckets(m.grad for m in moving if m.grad is not None):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat)
            for grad, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(total.view_as(grad))


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients of one dtype, in order, up to ``BUCKET`` elements."""
    bucket: list[Tensor] = []
    for grad in grads:
        if bucket and (grad.dtype != bucket[0].dtype or sum(g.numel() for g in bucket) + grad.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket


def current_world() -> World:
    """Return rank and size in torch.distributed's default group; a single process if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, rank, size, sends=rank == 0)


def sum_over_ranks(value: Tensor, device: torch.device) -> Tensor:
    """Return the sum of ``value`` over all trainer ranks, on its device. A collective.

    Args:
        device: device of the model, used for the communication.
    """
    world = current_world()
    return value if world.size == 1 else Replicated(world, device).sum(value)


@contextmanager
def drain(units: Iterator[WeightUnit]) -> Iterator[Iterator[WeightUnit]]:
    """Consume the remaining units on exit, also after an error, because other ranks wait for this one at each unit.

    Not while the interpreter exits: PyTorch's reference counts are no longer maintained, and an operation aborts the process."""
    try:
        yield units
    finally:
        if not sys.is_finalizing():
            for _ in units:
                pass
