"""The micro-batches of a pass over a batch, in the form that Megatron-Core's schedules need, and their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles_core.data import Batch
from miles_core.trainer import Context, Output, Pass
from miles_megatron.sizes import Sizes
from miles_megatron.trainer.packing import Packing, pack, row_length, split

Pairs = dict[str, tuple[Tensor, Tensor]]


@dataclass
class Flight:
    """One micro-batch of a pass on this rank.

    Attributes:
        samples: indices of its samples in the batch; empty for a micro-batch that only equalises the count across ranks.
        micro_batch: its samples, on the model's device.
        packing: layout of its tokens.
        kind: kind of the pass.
        entropy: whether the pass computes the entropy.
        output: output of the last stage.
        metrics: (sum, weight) pairs of the loss, on the last stage.
        shares: (sum, weight) pairs that wrappers reported, for the rows and layers of this rank.
    """

    samples: list[int]
    micro_batch: Batch
    packing: Packing
    kind: Pass
    entropy: bool
    output: Output | None = None
    metrics: Pairs = field(default_factory=dict)
    shares: Pairs = field(default_factory=dict)

    def context(self, layers: tuple[int, ...], s: Sizes, recompute: bool) -> Context:
        """Return the context of the forward pass through one chunk with the decoder layers ``layers``."""
        rows = self.packing.rows
        if s.sequence:
            rows = rows.chunk(s.tp)[parallel_state.get_tensor_model_parallel_rank()]
        ctx = Context(self.kind, layers, rows, recompute=recompute)
        ctx.attached.update(packing=self.packing, entropy=self.entropy)
        return ctx


def split_into_flights(
    batch: Batch,
    s: Sizes,
    size: int | None,
    tokens: int | None,
    kind: Pass,
    entropy: bool,
    device: torch.device,
    multiple: int = 1,
) -> list[Flight]:
    """Split a batch into micro-batches. Ranks with fewer micro-batches add empty ones, so that all ranks have the same number.

    Args:
        batch: this rank's samples.
        s: parallel sizes.
        size: samples per micro-batch, or None.
        tokens: maximum tokens per micro-batch and rank, instead of ``size``.
        kind: kind of the pass.
        entropy: whether the pass computes the entropy.
        device: device of the model.
        multiple: pad each rank's row to a multiple of this many tokens.
    """
    dealt = list(split(batch, size, None if tokens is None else tokens * s.cp))
    count = torch.tensor([max(len(dealt), 1)], device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    wanted = int(count)
    if s.virtual > 1:
        wanted += -wanted % s.pp
    dealt += [[] for _ in range(wanted - len(dealt))]
    rank = parallel_state.get_context_parallel_rank()
    # Megatron-Core sends the row length to the next stage, but not between virtual stages; there all rows need the same length
    least = max(row_length(batch.select(samples), s, multiple) for samples in dealt) if s.virtual > 1 else 0
    found = []
    for samples in dealt:
        micro_batch = batch.select(samples)
        packing = pack(micro_batch.to("cpu"), s, rank, multiple, least).to(device)
        found.append(Flight(samples, micro_batch.to(device), packing, kind, entropy))
    return found


def reduce_metrics(flights: Sequence[Flight]) -> Pairs:
    """Sum the metrics over all micro-batches and over all ranks of this replica, in FP64. A collective."""
    stages = parallel_state.get_pipeline_model_parallel_group()
    model, context = parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()
    shares = _added([_added([flight.shares for flight in flights], model)], context)
    found = shares | _added([flight.metrics for flight in flights], stages)
    double = torch.float64
    return {n: (torch.tensor(t, dtype=double), torch.tensor(w, dtype=double)) for n, (t, w) in found.items()}


def _added(pairs: Sequence[Mapping[str, tuple[Any, Any]]], group: Any) -> dict[str, tuple[float, float]]:
    """Merge (sum, weight) pairs of all ranks of a group; (maximum, weight) where a name ends in ``_max``."""
    mine = _numbers(pairs)
    everyone: list[Any] = [mine]
    if group.size() > 1:
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
    totals: dict[str, tuple[float, float]] = {}
    for found in (p for each in everyone for p in each):
        for name, (total, weight) in found.items():
            old, before = totals.get(name, (0.0, 0.0))
            totals[name] = (max(old, total) if name.endswith("_max") else old + total, before + weight)
    return totals


def _numbers(pairs: Sequence[Mapping[str, tuple[Any, Any]]]) -> list[dict[str, tuple[float, float]]]:
    """Convert the pairs to Python floats with a single device synchronisation."""
    flat = [torch.as_tensor(x, dtype=torch.float64) for p in pairs for pair in p.values() for x in pair]
    device = next((x.device for x in flat if x.device.type != "cpu"), torch.device("cpu"))
    values = iter(torch.stack([x.to(device) for x in flat]).tolist() if flat else ())
    return [{name: (next(values), next(values)) for name in p} for p in pairs]


def merge(one: Pairs, other: Mapping[str, tuple[Tensor, Tensor]]) -> Pairs:
    """Add (sum, weight) pairs, detached and in FP64."""
    result: Any = dict(one)
    for name, pair in other.items():
        total, weight = (torch.as_tensor(x, dtype=torch.float64).detach() for x in pair)
        before = result.get(name, (0.0, 0.0))
        result[name] = (total + before[0], weight + before[1])
    found: Pairs = result
    return found


def flatten(batch: Batch, flights: Sequence[Flight], names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the last stage's outputs in the order of the batch's tokens, on every pipeline stage. A collective."""
    home = batch.tokens.device
    group = parallel_state.get_pipeline_model_parallel_group()
    source = dist.get_global_rank(group, group.size() - 1)
    found = {}
    for name in names:
        column = torch.zeros(len(batch.tokens))
        for flight in flights:
            if flight.samples and flight.output is not None:
                column.index_copy_(0, _positions(batch, flight.samples), getattr(flight.output, name).float().cpu())
        if group.size() > 1:
            device = flights[0].packing.rows.device
            column = column.to(device)
            dist.broadcast(column, source, group=group)
        found[name] = column.to(home)
    return found


def _positions(batch: Batch, samples: list[int]) -> Tensor:
    """Return the flat positions of these samples' tokens, in order."""
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    return torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in samples])
