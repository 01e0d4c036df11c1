"""Training in several processes, each with samples of its own.

Gradients are summed over processes and never averaged, since losses are already divided by what the whole step holds. What a
trainer asks of the others is one object: ``Alone`` asks nobody, ``Replicated`` has the whole model in every process, and
``FullyShard`` (``fully_shard``) a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles_core.contracts.trainer import Context, Forward, Output
from miles_core.data.batch import Batch
from miles_core.data.world import ALONE, World

#: Elements of one sum over processes; gradients are put together up to this many.
BUCKET = 1 << 24


class Alone:
    """The trainer is one process."""

    #: ranks make equally many forward calls, because each is a collective
    in_step = False

    def __init__(self, world: World = ALONE) -> None:
        self.world = world

    def shard(self, model: nn.Module) -> None:
        """Give this process its part of ``model``, which is complete in every process."""

    def call(self, forward: Forward, model: nn.Module, micro_batch: Batch, ctx: Context) -> Output:
        """``forward`` of one micro-batch."""
        return forward(model, micro_batch, ctx)

    def sum(self, value: Tensor) -> Tensor:
        """Add over processes; the result is where ``value`` is."""
        return value

    def most(self, count: int) -> int:
        """The largest of all processes' counts."""
        return count

    def first(self, text: str) -> str:
        """The text of the first process that has one; "" when none does."""
        return text

    def sum_gradients(self, masters: Iterable[Tensor]) -> None:
        """Let every ``grad`` be the sum of all processes'; where only some have one, the others' is zero."""

    def square_norm(self, value: Tensor) -> Tensor:
        """The square norm of all gradients, from that of those this process steps."""
        return value


class Replicated(Alone):
    """Every process has the whole model and steps it alike.

    Args:
        world: this process among the others, which are torch.distributed's default group.
        device: where the model is; values that are summed travel from there.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        super().__init__(world)
        self.device = device

    def sum(self, value: Tensor) -> Tensor:
        """See ``Alone.sum``."""
        total = value.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(value.device)

    def most(self, count: int) -> int:
        """See ``Alone.most``."""
        largest = torch.tensor(count, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def first(self, text: str) -> str:
        """See ``Alone.first``."""
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
    """Gradients of one dtype together, as they come, up to ``BUCKET`` elements."""
    bucket: list[Tensor] = []
    for grad in grads:
        if bucket and (grad.dtype != bucket[0].dtype or sum(g.numel() for g in bucket) + grad.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket


def world_here() -> World:
    """This process among those of torch.distributed's default group; alone without one."""
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, rank, size)
