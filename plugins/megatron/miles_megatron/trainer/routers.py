"""Routing replay, load-balancing loss, capacity and load statistics at the MoE routers.

Megatron-Core's layers accept no per-call context, and recomputation runs them again after the call has ended. Each router therefore has a
queue: a training pass appends its ``Passage``, and the recomputation, which runs in the same order, removes it. Replayed routes enter
through the router's hook for Megatron-Core's ``RouterReplay``.

The load-balancing loss is computed per sample (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20): for T tokens and E experts with k
chosen per token, ``sum_e f_e P_e`` with ``f_e = E / (k T) * (number of times e was chosen)`` and ``P_e`` the mean normalised score. It is
weighted by the sample's trained tokens and divided by the trained tokens of the whole step, so it depends neither on packing nor on the
parallel sizes.

Assignments above an expert's capacity (``moe_expert_capacity_factor``) are dropped after the choice. Unlike Megatron-Core's own rule, padding
and tokens after the last trained one do not compete for capacity, so the result is that of the embedded trainer. Loads and the loss count
the choices from before, and verifications drop nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from miles_core.data import Batch
from miles_core.plugin import PluginError
from miles_core.trainer import GIVEN_ROUTES, OWN_ROUTES, Context
from miles_megatron.architecture import Architecture

#: Passes in which experts have a capacity.
_LIMITED = ("old", "ref", "train")


@dataclass
class Passage:
    """The state of one micro-batch's pass through the routers of one chunk.

    Attributes:
        routes: [rows, sparse layers of the model, k] the experts to replay; None if the routers choose.
        owner: [rows] the sample index of each row on this rank; -1 for padding and for tokens after the last trained token.
        lengths: [samples] number of tokens that count for balance and loads.
        trained: [samples] number of trained tokens.
        training: whether to count loads, compute the loss, and keep the passage for recomputation.
        limited: whether experts have a capacity.
        own: sparse layer -> [rows, k] the router's own choice; filled in replayed passes.
        balance: sum of this rank's unscaled load-balancing loss over the routers that ran.
        passed: number of routers that ran.
        assigned, dropped: number of assignments to experts, and of those above the experts' capacity.
    """

    routes: Tensor | None
    owner: Tensor
    lengths: Tensor
    trained: Tensor
    training: bool
    limited: bool
    own: dict[int, Tensor] = field(default_factory=dict)
    balance: Tensor | float = 0.0
    passed: int = 0
    assigned: Tensor | float = 0.0
    dropped: Tensor | float = 0.0


class Routers:
    """The routers of this rank's chunks.

    Args:
        chunks: the chunks, not wrapped.
        a: the architecture.
        coefficient: coefficient of the load-balancing loss; 0 disables it.
    """

    def __init__(self, chunks: Sequence[nn.Module], a: Architecture, coefficient: float) -> None:
        self.a, self.coefficient = a, coefficient
        self.tokens = torch.ones(())  #: trained tokens of the step on all replicas
        self.active: Passage | None = None
        self._sparse = [i for i, sparse in enumerate(a.sparse) if sparse and a.experts is not None]
        self._seats = [
            _Seat(self, module, self._sparse.index(int(layer.layer_number) - 1))
            for chunk in chunks
            for layer in chunk.decoder.layers  # type: ignore[union-attr]
            for module in layer.modules()
            if hasattr(module, "router_replay")
        ]

    @contextmanager
    def activate(self, micro_batch: Batch, ctx: Context) -> Iterator[None]:
        """Set the micro-batch that a chunk's routers process inside the context."""
        if not self._sparse:
            yield
            return
        # no indexing with masks: the result's size would need a device synchronisation
        owner, trained, samples = micro_batch.owner, micro_batch.mask != 0, len(micro_batch)
        tokens, starts = torch.arange(len(owner), device=owner.device), micro_batch.starts
        end = starts.scatter_reduce(0, owner, torch.where(trained, tokens, starts[owner]), "amax")
        needed = tokens < end[owner]
        count = owner.new_zeros(samples)
        passage = self.active = Passage(
            routes=self._routes(ctx),
            owner=pad(torch.where(needed, owner, -1), (0, 1), value=-1)[
                ctx.rows
            ],  # index -1 (padding) reads the last entry
            lengths=count.scatter_add(0, owner, needed.long()).clamp(min=1),
            trained=count.scatter_add(0, owner, trained.long()),
            training=ctx.kind == "train",
            limited=ctx.kind in _LIMITED,
        )
        try:
            yield
        finally:
            self.active = None
        if passage.routes is not None:
            ctx.attached[OWN_ROUTES] = passage.own
        if passage.training and any(seat.router.config.moe_expert_capacity_factor for seat in self._seats):
            ctx.metrics["moe/dropped_fraction"] = (torch.as_tensor(passage.dropped), torch.as_tensor(passage.assigned))
        if passage.training and self.coefficient and passage.passed:
            share = passage.passed / len(self._sparse) / _ranks(self._seats[0].router).size()
            total = torch.as_tensor(passage.balance) * self.coefficient
            ctx.metrics["train/load_balance"] = (total, passage.trained.sum() * share)

    def _routes(self, ctx: Context) -> Tensor | None:
        assert self.a.experts is not None
        routes: Tensor | None = ctx.attached.get(GIVEN_ROUTES)
        wanted = (len(ctx.rows), len(self._sparse), self.a.experts.top_k)
        if routes is not None and tuple(routes.shape) != wanted:
            raise PluginError(
                f"the routes to replay have shape {list(routes.shape)} (rows, MoE layers, experts per token), but this rank needs "
                f"{list(wanted)}; engine and trainer must run the same model"
            )
        return routes

    def begin(self, tokens: Tensor) -> None:
        """Begin a step. tokens: number of trained tokens on all replicas."""
        self.tokens = tokens
        for seat in self._seats:
            seat.loads.zero_()

    def end(self) -> dict[str, tuple[float, float]]:
        """End a step and return its expert imbalance: the maximum over layers of the largest load divided by the mean load.

        A collective."""
        for seat in self._seats:
            seat.waiting.clear()
        if not self._sparse:
            return {}
        assert self.a.experts is not None
        loads = self.tokens.new_zeros(len(self._sparse), self.a.experts.count, dtype=torch.float64)
        for seat in self._seats:
            loads[seat.position] = seat.loads
        dist.all_reduce(loads)
        worst = float((loads.amax(1) / loads.mean(1)).nan_to_num().max())  # 0 / 0: the step had no trained tokens
        return {"train/expert_imbalance": (worst, 1.0)} if worst else {}


class _Seat:
    """Wraps one router: replaces its ``routing`` method and its ``RouterReplay``, which is called between scores and choice."""

    def __init__(self, routers: Routers, router: Any, position: int) -> None:
        self.routers, self.router, self.position = routers, router, position
        self.waiting: deque[Passage] = deque()
        self.loads = torch.zeros(router.num_experts, dtype=torch.float64, device=router.weight.device)
        self._now: Passage | None = None
        self._inner: Callable[..., tuple[Tensor, Tensor]] = router.routing
        router.routing, router.router_replay = self.routing, self

    def routing(self, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        """Run the router's own ``routing`` for the active passage, or for the oldest waiting one during recomputation."""
        active = self.routers.active
        passage = self._now = active or self.waiting.popleft()
        config = self.router.config
        factor, config.moe_expert_capacity_factor = config.moe_expert_capacity_factor, None
        try:
            weights, chosen = self._inner(logits, padding_mask=padding_mask)
        finally:
            self._now, config.moe_expert_capacity_factor = None, factor
        kept = chosen
        if factor is not None and passage.limited:
            kept = self._find_kept(passage, weights, chosen, factor)
            weights = weights * kept
        if not passage.training:
            return weights, kept
        if active:
            passage.assigned += (chosen & (passage.owner >= 0).unsqueeze(1)).sum()
            passage.dropped += (chosen & ~kept).sum()
            self.waiting.append(passage)
            self.loads += (chosen & (passage.owner >= 0).unsqueeze(1)).sum(0)
        if not self.routers.coefficient:
            return weights, kept
        balance = self._balance(passage, logits.flatten(0, -2), chosen)
        if active:
            passage.balance += _total(balance.detach(), self.router) / _ranks(self.router).size()
            passage.passed += 1
        return _AddLoss.apply(weights, balance * (self.routers.coefficient / self.routers.tokens)), kept

    def _find_kept(self, passage: Passage, weights: Tensor, chosen: Tensor, factor: float) -> Tensor:
        """Return [rows, experts] bool: the choices within the capacity of their expert, ``ceil(factor * rows * top_k / experts)``."""
        counted = chosen & (passage.owner >= 0).unsqueeze(1)
        rows = (passage.owner >= 0).sum().double()
        mean = rows * self.router.topk / chosen.shape[1]
        capacity = torch.ceil(factor * mean - 1e-9)  # 1.1 * 10 is 11.000000000000002
        if self.router.config.moe_token_drop_policy == "position":
            return chosen & (~counted | (counted.cumsum(0) <= capacity))
        order = weights.detach().masked_fill(~counted, -1.0).argsort(dim=0, descending=True, stable=True)
        places = torch.arange(len(order), device=order.device).unsqueeze(1).expand_as(order)
        place = torch.empty_like(order).scatter_(0, order, places)
        return chosen & (~counted | (place < capacity))

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        """Return [rows, k] scores and indices of the experts to use. Called by Megatron-Core."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        passage = self._now
        if passage is None or passage.routes is None:
            return values, own
        passage.own.setdefault(self.position, own.detach())
        given = passage.routes[:, self.position]
        return scores.gather(1, given), given

    def _balance(self, passage: Passage, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return this rank's part of the layer's loss: the sum over samples, weighted by their trained tokens."""
        router = self.router
        scores = logits.float().sigmoid() if router.score_function == "sigmoid" else logits.float().softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        samples = len(passage.lengths)
        to = torch.where(passage.owner < 0, samples, passage.owner)  # an additional row collects rows without a sample
        times, mean = (
            scores.new_zeros(samples + 1, scores.shape[1]).index_add(0, to, values)[:samples]
            / passage.lengths.unsqueeze(1)
            for values in (chosen.to(scores.dtype), scores)
        )
        frequency = _total(times, router) * (scores.shape[1] / router.topk)
        return (passage.trained * (frequency * mean).sum(1)).sum()


def _ranks(router: Any) -> Any:
    """Return the group of ranks that share a micro-batch's tokens: tensor-parallel (MoE requires sequence parallelism) and
    context-parallel ranks."""
    return router.tp_cp_group


def _total(value: Tensor, router: Any) -> Tensor:
    """Sum over ``_ranks``, without a gradient."""
    if _ranks(router).size() == 1:
        return value
    total = value.clone()
    dist.all_reduce(total, group=_ranks(router))
    return total


class _AddLoss(torch.autograd.Function):
    """Return the first argument; the backward pass gives the second argument gradient 1, as for a term of the loss."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, summand: Tensor) -> Tensor:
        ctx.save_for_backward(summand)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (summand,) = ctx.saved_tensors
        return grads[0], torch.ones_like(summand)
