"""The C kernels as functions of tensors: float32 on a CPU, contiguous unless noted, with gradients where training needs them.

Sources: RMSNorm, Zhang and Sennrich 2019; rotary embedding, Su et al. 2021; SwiGLU, Shazeer 2020; the gradient of attention from the
normalisation of each row, Dao et al. 2022 (FlashAttention), algorithm 4.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles_cpu_kernels.library import Slab, library

#: The gradient of a norm's weight is summed over at most _PIECES pieces of at least _PIECE rows each.
_PIECES, _PIECE = 64, 32


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels support these tensors: float32 on a CPU."""
    return all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / sqrt(mean(x**2) + eps) over the last dimension of x [..., dim]; weight [dim]."""
    return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _normalize(x.contiguous(), weight, eps)[0]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply a rotary embedding: x * cosine + (-x2 | x1) * sine, with x1 and x2 the halves of x.

    x: [1, heads, rows, dim]; cosine, sine: [1, rows, dim]."""
    if torch.is_grad_enabled():
        return _Rotate.apply(x, cosine, sine)
    return _apply_rotation(x, cosine.contiguous(), sine.contiguous(), False)


@dataclass(frozen=True)
class SortedChoices:
    """The expert choices of rows in a stable order sorted by expert.

    Attributes:
        order: [rows * k] index of the choice at each sorted position.
        place: [rows, k] sorted position of each choice.
        row: [rows * k] row of each sorted position.
        ends: [experts] int32 end of each expert's positions.
        counts: [experts] number of each expert's positions.
    """

    order: Tensor
    place: Tensor
    row: Tensor
    ends: Tensor
    counts: Tensor


def sort_choices(index: Tensor, experts: int) -> SortedChoices:
    """Sort the choices in ``index`` [rows, k] int64 by expert. Raises IndexError for an index outside of ``experts``."""
    order, place, row = torch.empty(3, index.numel(), dtype=torch.int64).unbind(0)
    ends, counts = torch.empty(experts, dtype=torch.int32), torch.empty(experts, dtype=torch.int64)
    pointers = (t.data_ptr() for t in (index, order, place, row, counts, ends))
    if library().sort_choices(*pointers, *index.shape, experts):
        raise IndexError(f"an expert index is not in the range 0 to {experts - 1}")
    return SortedChoices(order, place.view_as(index), row, ends, counts)


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return [rows]: the log-softmax of logits [rows, vocabulary] at tokens [rows]. Raises IndexError for an invalid token id."""
    return _LogProbs.apply(logits, tokens)


def gather_sum(x: Tensor, place: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return [rows, dim]: the sum of x [places, dim] over each row's ``place`` [rows, k], weighted by ``weight`` [rows, k]. No gradient."""
    rows, k = place.shape
    out = x.new_empty(rows, x.shape[1])
    where = None if weight is None else weight.data_ptr()
    library().gather_sum(
        x.data_ptr(), place.data_ptr(), where, out.data_ptr(), rows, k, x.shape[1], torch.get_num_threads()
    )
    return out


def experts(
    hidden: Tensor, row: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute down(silu(gate) * up) of every choice, without a gradient.

    Args:
        hidden: [rows, dim].
        row: [places] row of each choice, sorted by expert.
        ends: [experts] int32 end of each expert's places.
        gate_up: [experts, 2 inner, dim].
        down: [experts, dim, inner].
        keep: also return gate and up.

    Returns:
        the outputs [places, dim], and gate and up [places, 2 inner] or None.
    """
    count, dim, inner = down.shape
    y = hidden.new_empty(len(row), dim)
    product = hidden.new_empty(len(row), 2 * inner) if keep else None
    failed = library().experts(
        *(t.data_ptr() for t in (hidden, row, ends, gate_up, down)),
        None if product is None else product.data_ptr(),
        y.data_ptr(),
        count,
        dim,
        inner,
        torch.get_num_threads(),
    )
    _check(failed)
    return y, product


def experts_backward(
    grad: Tensor, row: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor, product: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute gradients through ``experts`` and the weighted sum of its outputs.

    Args:
        grad: [rows, dim] gradient of each row's weighted sum.
        row, ends, gate_up, down: as for ``experts``.
        product: [places, 2 inner] gate and up from ``experts``.
        scale: [places] weight of each choice.

    Returns:
        h * scale [places, inner] (h is silu(gate) * up), and the gradients of product [places, 2 inner], of scale [places] and of each
        place's row of hidden [places, dim].
    """
    count, dim, inner = down.shape
    scaled, grad_product, grad_scale = (
        grad.new_empty(len(row), inner),
        torch.empty_like(product),
        torch.empty_like(scale),
    )
    grad_x = grad.new_empty(len(row), dim)
    given = (grad, row, ends, gate_up, down, product, scale)
    pointers = (t.data_ptr() for t in (*given, scaled, grad_product, grad_scale, grad_x))
    _check(library().experts_backward(*pointers, count, dim, inner, torch.get_num_threads()))
    return scaled, grad_product, grad_scale, grad_x


def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: Tree, scaling: float) -> Tensor:
    """Compute attention of rows to their segment's trunk, and causally to their own segment.

    Args:
        q: [rows, heads, dim].
        k: [rows, kv heads, dim].
        v: [rows, kv heads, value dim].
        tree: the segments.
        scaling: factor of the scores, positive.

    Returns:
        [rows, heads, value dim].
    """
    return _TreeAttention.apply(q, k, v, tree, scaling)


class Tree:
    """The segments of a packing.

    Args:
        segments: [segments, 4] int64: first row and length of the visible trunk (length 0: none), then of the segment itself;
            a trunk directly precedes its branches.
        families: [trunks + 1] int64 index of the first segment of each trunk.
    """

    def __init__(self, segments: Tensor, families: Tensor) -> None:
        self.segments, self.families = segments.contiguous(), families.contiguous()
        self.longest = int((segments[:, 1] + segments[:, 3]).max())


class Cached:
    """Cache positions of the rows of a decode call; int64 arrays.

    Args:
        offsets: [rows + 1]: row i feeds the tokens offsets[i] to offsets[i + 1].
        prompt_of: [rows] slot of the prompt.
        prompt_length: [rows] number of tokens of the prompt.
        slot: [rows] slot of the row.
        before: [rows] number of tokens in the slot before this call.
    """

    def __init__(self, offsets: Tensor, prompt_of: Tensor, prompt_length: Tensor, slot: Tensor, before: Tensor) -> None:
        self._arrays = tuple(t.contiguous() for t in (offsets, prompt_of, prompt_length, slot, before))
        self.rows = len(slot)
        self.longest = int((prompt_length + before + offsets.diff()).max())

    @property
    def pointers(self) -> list[int]:
        """Data pointers of the arrays, in the order of the constructor."""
        return [t.data_ptr() for t in self._arrays]


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompts: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    cached: Cached,
    scaling: float,
) -> Tensor:
    """Append the tokens' keys and values to the cache, and compute attention to each row's prompt and own tokens. No gradient.

    Args:
        q: [tokens, heads, dim].
        k: [tokens, kv heads, dim].
        v: [tokens, kv heads, value dim].
        prompts: slabs [slots, kv heads, capacity, (value) dim] of keys and of values.
        own: slabs of the rows' own tokens, with room for the new tokens.
        cached: cache positions of the rows.
        scaling: factor of the scores, positive.

    Returns:
        [tokens, heads, value dim].
    """
    out = q.new_empty(*q.shape[:2], v.shape[2])
    far, near = (Slab(a.data_ptr(), b.data_ptr(), a.shape[2], b.shape[2]) for a, b in (prompts, own))
    failed = library().cached_attention(
        *(t.data_ptr() for t in (q, k, v)),
        byref(far),
        byref(near),
        *cached.pointers,
        cached.rows,
        cached.longest,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        v.shape[2],
        scaling,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    _check(failed)
    return out


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("a CPU kernel could not allocate memory")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, inverse = _normalize(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        grad, dim, rows = grads[0].contiguous(), len(weight), len(inverse)
        pieces = max(1, min(_PIECES, rows // _PIECE))
        grad_x, grad_weight, partial = torch.empty_like(x), torch.empty_like(weight), x.new_empty(pieces, dim)
        pointers = (t.data_ptr() for t in (grad, x, weight, inverse, grad_x, grad_weight, partial))
        library().rms_norm_backward(*pointers, pieces, rows, dim, torch.get_num_threads())
        return grad_x, grad_weight, None


def _normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised x and the inverse root mean square of each row."""
    weight = weight.contiguous()
    dim = x.shape[-1]
    rows = x.numel() // dim
    out, inverse = torch.empty_like(x), x.new_empty(rows)
    library().rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), inverse.data_ptr(), rows, dim, eps, torch.get_num_threads()
    )
    return out, inverse


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        cosine, sine = cosine.contiguous(), sine.contiguous()
        ctx.save_for_backward(cosine, sine)
        return _apply_rotation(x, cosine, sine, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _apply_rotation(grads[0], cosine, sine, True), None, None


def _apply_rotation(x: Tensor, cosine: Tensor, sine: Tensor, backward: bool) -> Tensor:
    by_row = x[0].transpose(0, 1).contiguous()
    out = torch.empty_like(by_row)
    pointers = (t.data_ptr() for t in (by_row, cosine, sine, out))
    library().rotate(*pointers, *by_row.shape, backward, torch.get_num_threads())
    return out.transpose(0, 1).unsqueeze(0)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        logits, tokens = logits.contiguous(), tokens.to(torch.int64).contiguous()
        out, norm = logits.new_empty(len(tokens)), logits.new_empty(len(tokens), 2)
        pointers = (t.data_ptr() for t in (logits, tokens, out, norm))
        if library().log_probs(*pointers, *logits.shape, torch.get_num_threads()):
            raise IndexError(f"a token id is not in the range 0 to {logits.shape[1] - 1}")
        ctx.save_for_backward(logits, tokens, norm)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, norm = ctx.saved_tensors
        grad, grad_logits = grads[0].contiguous(), torch.empty_like(logits)
        pointers = (t.data_ptr() for t in (grad, logits, tokens, norm, grad_logits))
        library().log_probs_backward(*pointers, *logits.shape, torch.get_num_threads())
        return grad_logits, None


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tree: Tree, scaling: float) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, norm = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(*q.shape[:2], 2)
        failed = library().tree_attention(
            *(t.data_ptr() for t in (q, k, v, tree.segments)),
            len(tree.segments),
            tree.longest,
            *_sizes(q, k, v),
            scaling,
            out.data_ptr(),
            norm.data_ptr(),
            torch.get_num_threads(),
        )
        _check(failed)
        ctx.save_for_backward(q, k, v, norm)
        ctx.tree, ctx.scaling = tree, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, norm = ctx.saved_tensors
        tree: Tree = ctx.tree
        grad = grads[0].contiguous()
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        failed = library().tree_attention_backward(
            *(t.data_ptr() for t in (grad, q, k, v, norm, tree.segments, tree.families)),
            len(tree.families) - 1,
            tree.longest,
            *_sizes(q, k, v),
            ctx.scaling,
            *(t.data_ptr() for t in (grad_q, grad_k, grad_v)),
            torch.get_num_threads(),
        )
        _check(failed)
        return grad_q, grad_k, grad_v, None, None


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Return (heads, KV heads, dim, value dim)."""
    return q.shape[1], k.shape[1], q.shape[2], v.shape[2]
