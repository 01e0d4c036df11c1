"""The functions of the C files on tensors: float32 on a CPU, contiguous where nothing else is said, with gradients where
training needs them.

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

#: The gradient of a norm's weight is summed in at most this many pieces of the rows, of at least so many rows.
_PIECES, _PIECE = 64, 32


def takes(*tensors: Tensor) -> bool:
    """Whether the functions here take these: float32, on a CPU."""
    return all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x**2) + eps) over the last dimension of x [..., dim]; weight [dim]."""
    return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _normed(x.contiguous(), weight, eps)[0]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [1, heads, rows, dim] rotated by cosine and sine [1, rows, dim]: x * cosine + (-x2 | x1) * sine, x1 and x2 its halves."""
    if torch.is_grad_enabled():
        return _Rotate.apply(x, cosine, sine)
    return _rotated(x, cosine.contiguous(), sine.contiguous(), False)


@dataclass(frozen=True)
class SortedChoices:
    """Choices of rows sorted by expert, in order within one.

    Attributes:
        order: [rows * k] the choice at each sorted place.
        place: [rows, k] the inverse.
        row: [rows * k] the row of each sorted place.
        ends: [experts] int32, where each expert's places end.
        counts: [experts] their number.
    """

    order: Tensor
    place: Tensor
    row: Tensor
    ends: Tensor
    counts: Tensor


def sort_choices(index: Tensor, experts: int) -> SortedChoices:
    """Sort choices index [rows, k] int64; IndexError for a choice that is none of ``experts``."""
    order, place, row = torch.empty(3, index.numel(), dtype=torch.int64).unbind(0)
    ends, counts = torch.empty(experts, dtype=torch.int32), torch.empty(experts, dtype=torch.int64)
    pointers = (t.data_ptr() for t in (index, order, place, row, counts, ends))
    if library().sort_choices(*pointers, *index.shape, experts):
        raise IndexError(f"an expert's number is none of 0 to {experts - 1}")
    return SortedChoices(order, place.view_as(index), row, ends, counts)


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits [rows, vocabulary])[tokens [rows]] -> [rows]."""
    return _LogProbs.apply(logits, tokens)


def gather_sum(x: Tensor, place: Tensor, weight: Tensor | None = None) -> Tensor:
    """[places, dim] -> [rows, dim]: the sum of each row's places [rows, k], each times its weight [rows, k]; without a gradient."""
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
    """down(silu(gate) * up) of every choice; without a gradient.

    Args:
        hidden: [rows, dim].
        row: [places] of each choice, sorted by expert.
        ends: [experts] int32, where each expert's places end.
        gate_up: [experts, 2 inner, dim].
        down: [experts, dim, inner].
        keep: also return the products gate | up.

    Returns:
        [places, dim], and [places, 2 inner] or None.
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
    """The gradient through ``experts`` and a weight a choice.

    Args:
        grad: [rows, dim] of each row's weighted sum.
        row, ends, gate_up, down: as there.
        product: what it kept.
        scale: [places] weights.

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
    """Rows attend to their segment's trunk and to their own segment up to themselves.

    Args:
        q: [rows, heads, dim].
        k: [rows, kv heads, dim].
        v: [rows, kv heads, value dim].
        tree: the segments.
        scaling: of the scores; more than 0.

    Returns:
        [rows, heads, value dim].
    """
    return _TreeAttention.apply(q, k, v, tree, scaling)


class Tree:
    """The segments of a packing.

    Args:
        segments: [segments, 4] int64: first row and length of the trunk that is seen (length 0: none), then of the segment itself;
            a trunk comes right before its branches.
        families: [trunks + 1] int64, where each trunk's segments begin.
    """

    def __init__(self, segments: Tensor, families: Tensor) -> None:
        self.segments, self.families = segments.contiguous(), families.contiguous()
        self.longest = int((segments[:, 1] + segments[:, 3]).max())


class Cached:
    """Where the rows of a decode call are in the cache; int64, [rows] each but offsets [rows + 1] of their fed tokens.

    Args:
        offsets: row i feeds tokens offsets[i] to offsets[i + 1].
        prompt_of: slot of the prompt.
        prompt_length: its tokens.
        slot: slot of the row.
        before: tokens in it before this call.
    """

    def __init__(self, offsets: Tensor, prompt_of: Tensor, prompt_length: Tensor, slot: Tensor, before: Tensor) -> None:
        self._arrays = tuple(t.contiguous() for t in (offsets, prompt_of, prompt_length, slot, before))
        self.rows = len(slot)
        self.longest = int((prompt_length + before + offsets.diff()).max())

    @property
    def pointers(self) -> list[int]:
        """In the order of the constructor."""
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
    """Append the fed tokens' keys and values to the cache and attend to each row's prompt and own tokens; without a gradient.

    Args:
        q: [tokens, heads, dim].
        k: [tokens, kv heads, dim].
        v: [tokens, kv heads, value dim].
        prompts: slabs [slots, kv heads, capacity, (value) dim] of keys and of values.
        own: likewise, with room for the fed tokens.
        cached: see ``Cached``.
        scaling: of the scores; more than 0.

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
        raise MemoryError("no memory for a compiled step")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, inverse = _normed(x, weight, eps)
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


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x, and the factor of each of its rows."""
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
        return _rotated(x, cosine, sine, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _rotated(grads[0], cosine, sine, True), None, None


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor, backward: bool) -> Tensor:
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
            raise IndexError(f"a token's id is none of 0 to {logits.shape[1] - 1}")
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
    """heads, kv heads, dim, value dim."""
    return q.shape[1], k.shape[1], q.shape[2], v.shape[2]
