"""Flash attention over trunks and branches on a GPU, without padding.

If the trunks are short, each branch gets a copy of its trunk's keys and values in front of its own, and one variable-length call computes
everything. The gradients of the copies are summed.

Otherwise nothing is copied. Attention over two sets of keys is the mixture of the attention over each, weighted by their sums of
exponentials. All segments attend to themselves in one variable-length call, branches attend to their trunks in a second one (siblings are
adjacent, so their rows form one sequence of queries), and the results are merged by their log-sum-exps. The backward pass makes the same two
calls: the kernel recomputes the probabilities as exp(score - log-sum-exp), so given the merged output and log-sum-exp each call returns
exactly the gradient contribution of its own keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_core.data.batch import to_device
from miles_embedded.kernels.available import kernels_run
from miles_embedded.model.flash import Sequences, flash_forward, pad_heads
from miles_embedded.trainer.cudnn_attention import cudnn_forward, cudnn_gradients, cudnn_supports
from miles_embedded.trainer.packing import Ints, Packing, spans

#: Keys are copied if that gives at most so many keys per query of a branch, and at most so many elements of keys per element of queries.
#: Measured on an H200 with prompts of 64 to 8,192 tokens, 256 to 4,096 of a response, and 1 to 8 query heads per key head.
_KEYS, _ELEMENTS = 4.0, 1.5
#: Longest segment with copies where cuDNN is used, whose gradients take longer if there are more keys than queries.
_LONGEST = 2048


@dataclass
class Copies:
    """The keys of every segment, those of a branch's trunk in front of its own.

    Attributes:
        attended: every segment with its keys.
        rows: [E] physical row of each key.
        places: [E] the same keys, sorted by row.
        ends: [rows + 1] where the keys of each row start in ``places``.
    """

    attended: Sequences
    rows: Tensor
    places: Tensor
    ends: Tensor


class FlashPlan:
    """Arguments of the attention calls for a packing.

    Attributes:
        own: every segment with itself.
        across: the branches of each trunk with the trunk; None without branches.
        branch_rows: [B] physical rows of the branches, siblings adjacent.
        trunk_rows: [K] physical rows of the trunks that have branches.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        device = packing.rows.device
        trunks, branches = packing.trunks, packing.branches
        starts = np.concatenate([trunks.start, branches.start])
        lengths = np.concatenate([trunks.length, branches.length])[np.argsort(starts)]
        ends, longest = _ends(lengths, device), int(lengths.max())
        self.own = Sequences(ends, ends, longest, longest, causal=True)
        self.across: Sequences | None = None
        if len(branches):
            used, inverse = np.unique(branches.trunk, return_inverse=True)
            queries = np.bincount(inverse, weights=branches.length).astype(np.int64)
            keys = trunks.length[used]
            self.branch_rows = to_device(torch.from_numpy(spans(branches.start, branches.length)), device)
            self.trunk_rows = to_device(torch.from_numpy(spans(trunks.start[used], keys)), device)
            self.across = Sequences(
                _ends(queries, device), _ends(keys, device), int(queries.max()), int(keys.max()), causal=False
            )
            self._copied = int(trunks.length[branches.trunk].sum() + lengths.sum())

    def find_copies(self, q: Tensor, k: Tensor, scaling: float) -> Copies | None:
        """Return the keys of every segment if one call with copies is faster than two; None without branches. Arguments as for ``flash``."""
        if self.across is None or not kernels_run(q.device):
            return None
        if self._copied / len(self.branch_rows) > min(_KEYS, _ELEMENTS * q.shape[1] / k.shape[1]):
            return None
        if self.own.longest_query > _LONGEST and cudnn_supports(q, k, self.own, scaling):
            return None
        return self.copies

    @cached_property
    def copies(self) -> Copies:
        """The keys of every segment."""
        packing = self._packing
        trunks, branches, device = packing.trunks, packing.branches, packing.rows.device
        order = np.concatenate([trunks.start, branches.start]).argsort()

        def in_order(of_trunks: Ints, of_branches: Ints) -> Ints:
            found: Ints = np.concatenate([of_trunks, of_branches])[order]
            return found

        none = np.zeros(len(trunks), np.int64)
        # of every segment: where the keys in front of its own start, and its own
        starts = in_order(none, trunks.start[branches.trunk]), in_order(trunks.start, branches.start)
        lengths = in_order(none, trunks.length[branches.trunk]), in_order(trunks.length, branches.length)
        rows = spans(np.stack(starts, 1).ravel(), np.stack(lengths, 1).ravel())
        keys: Ints = lengths[0] + lengths[1]
        attended = Sequences(
            self.own.queries, _ends(keys, device), self.own.longest_query, int(keys.max()), causal=True
        )
        places = to_device(torch.from_numpy(rows.argsort(kind="stable")), device)
        return Copies(attended, to_device(torch.from_numpy(rows), device), places, _ends(np.bincount(rows), device))


def flash(q: Tensor, k: Tensor, v: Tensor, plan: FlashPlan, scaling: float) -> Tensor:
    """Attend q [rows, heads, dim] to k [rows, kv heads, dim] and v [rows, kv heads, width <= dim]; returns [rows, heads, width]."""
    out: Tensor = _Flash.apply(*pad_heads(q, k, v), plan, scaling)
    return out if out.shape[-1] == v.shape[-1] else out[..., : v.shape[-1]]


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: FlashPlan, scaling: float) -> Tensor:
        copies = plan.find_copies(q, k, scaling)
        if copies is not None:
            wide_k, wide_v = (x.index_select(0, copies.rows) for x in (k, v))
            out, lse, *seeds = _forward(q, wide_k, wide_v, copies.attended, scaling)
        else:
            out, lse, *seeds = _forward(q, k, v, plan.own, scaling)
        seeds_across: list[Tensor] = []
        if copies is None and plan.across is not None:
            rows, trunk = plan.branch_rows, plan.trunk_rows
            far_q, far_k, far_v = q.index_select(0, rows), k.index_select(0, trunk), v.index_select(0, trunk)
            far, far_lse, *seeds_across = _forward(far_q, far_k, far_v, plan.across, scaling)
            _merge(out, lse, far, far_lse, rows)
        ctx.save_for_backward(q, k, v, out, lse, *seeds, *seeds_across)
        ctx.plan, ctx.scaling = plan, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *seeds = ctx.saved_tensors
        found = _differentiate(grads[0].contiguous(), q, k, v, out, lse, ctx.plan, seeds, ctx.scaling)
        return *found, None, None


def flash_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: FlashPlan, scaling: float
) -> tuple[Tensor, ...]:
    """Compute the gradients of an attention that another kernel computed.

    Args:
        grad: [rows, heads, dim] gradient of ``out``.
        q: [rows, heads, dim], dim a multiple of 8.
        k: [rows, kv heads, dim].
        v: [rows, kv heads, dim].
        out: [rows, heads, dim].
        lse: [heads, rows] float32, the log of each query's sum of exponentials.
        plan: of the packing.
        scaling: factor on the scores.

    Returns:
        of q, k and v.
    """
    grad, q, k, v, out = (x.contiguous() for x in (grad, q, k, v, out))
    seeds = [torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros((), dtype=torch.uint64, device=q.device)]
    return _differentiate(grad, q, k, v, out, lse, plan, [*seeds, *seeds], scaling)


def _differentiate(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: FlashPlan,
    seeds: list[Tensor],
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; ``seeds``: two of each call's forward, which only dropout reads."""
    copies = plan.find_copies(q, k, scaling)
    if copies is not None:
        from miles_embedded.kernels.parts import sum_copies

        wide_k, wide_v = (x.index_select(0, copies.rows) for x in (k, v))
        grad_q, *wide = _backward(grad, q, wide_k, wide_v, out, lse, copies.attended, seeds[:2], scaling)
        grad_k, grad_v = (sum_copies(x, copies.places, copies.ends) for x in wide)
        return grad_q, grad_k, grad_v
    grad_q, grad_k, grad_v = _backward(grad, q, k, v, out, lse, plan.own, seeds[:2], scaling)
    if plan.across is not None:
        rows, trunk = plan.branch_rows, plan.trunk_rows
        far_q, far_k, far_v = _backward(
            grad.index_select(0, rows),
            q.index_select(0, rows),
            k.index_select(0, trunk),
            v.index_select(0, trunk),
            out.index_select(0, rows),
            lse.index_select(1, rows),
            plan.across,
            seeds[2:],
            scaling,
        )
        # Each row occurs once, so plain indexing adds exactly.
        for target, where, source in ((grad_q, rows, far_q), (grad_k, trunk, far_k), (grad_v, trunk, far_v)):
            _add(target, where, source)
    return grad_q, grad_k, grad_v


def _merge(out: Tensor, lse: Tensor, far: Tensor, far_lse: Tensor, rows: Tensor) -> None:
    """Merge the attention of ``rows`` to other keys into ``out`` and ``lse``, in place; see ``kernels.parts.merge_parts``."""
    if kernels_run(out.device) and out.is_contiguous() and far.is_contiguous():
        from miles_embedded.kernels.parts import merge_parts

        merge_parts(out, lse, far, far_lse, rows)
        return
    near_lse = lse[:, rows]
    both = torch.logaddexp(near_lse, far_lse)
    near_part, far_part = ((x - both).exp().t().unsqueeze(-1) for x in (near_lse, far_lse))
    out[rows] = (out[rows] * near_part + far * far_part).to(out.dtype)
    lse[:, rows] = both


def _add(target: Tensor, rows: Tensor, source: Tensor) -> None:
    """``target[rows] += source``."""
    if kernels_run(target.device) and target.is_contiguous() and source.is_contiguous():
        from miles_embedded.kernels.parts import add_rows

        add_rows(target, rows, source)
    else:
        target[rows] += source


def _forward(q: Tensor, k: Tensor, v: Tensor, part: Sequences, scaling: float) -> tuple[Tensor, ...]:
    """Attend like ``flash_forward``, with the faster library."""
    if cudnn_supports(q, k, part, scaling):
        return *cudnn_forward(q, k, v, part, scaling), q.new_empty(0), q.new_empty(0)
    return flash_forward(q, k, v, part, scaling)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Sequences,
    seeds: list[Tensor],
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if cudnn_supports(q, k, part, scaling):
        return cudnn_gradients(grad, q, k, v, out, lse, part, scaling)
    return torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        part.queries,
        part.keys,
        part.longest_query,
        part.longest_key,
        0.0,
        part.causal,
        *seeds,
        scale=scaling,
    )


def _ends(lengths: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)), device)
