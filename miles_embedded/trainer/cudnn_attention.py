"""Attention over packed sequences, computed by cuDNN through its Python package (``nvidia-cudnn-frontend``).

cuDNN builds a graph for upper bounds of the shapes, which takes some 50 ms. The bounds are rounded up, so that micro-batches share graphs;
sequences without tokens fill up their number.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from miles_core.errors import first_line
from miles_embedded.model.flash import Sequences

log = logging.getLogger(__name__)

#: Longest sequence of queries from which on cuDNN is faster than FlashAttention-2.
_SHORTEST = 512
#: Widest head of the kernels.
_WIDEST = 128
#: Largest offset of a sequence in elements: offsets are int32.
_FARTHEST = 2**31 - 1


@cache
def cudnn_runs(device: torch.device) -> bool:
    """Whether cuDNN computes attention on a device: a GPU of the generation Hopper or later, and the package is installed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    if importlib.util.find_spec("cudnn") is None:
        return False
    try:
        _handle(device)
    except Exception as error:  # another version of cuDNN, a driver that is too old
        log.warning(
            "cuDNN cannot be used, so FlashAttention-2 computes the gradients of attention: %s", first_line(error)
        )
        return False
    return True


def cudnn_supports(q: Tensor, k: Tensor, sequences: Sequences) -> bool:
    """Whether cuDNN should compute this attention: it can, and the sequences are long enough. It adds gradients in no fixed order, as
    deterministic algorithms have to."""
    return (
        sequences.longest_query >= _SHORTEST
        and q.shape[-1] <= _WIDEST
        and max(q.numel(), k.numel()) <= _FARTHEST
        and not torch.are_deterministic_algorithms_enabled()
        and cudnn_runs(q.device)
    )


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scaling: float) -> tuple[Tensor, Tensor]:
    """Attend without gradient.

    Args:
        q: [queries, heads, dim], contiguous like all tensors here.
        k: [keys, kv heads, dim].
        v: [keys, kv heads, dim].
        sequences: which keys a query attends to.
        scaling: factor on the scores.

    Returns:
        output [queries, heads, dim], and log-sum-exp [heads, queries] float32.
    """
    found = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    _run(_Shape.of(q, k, sequences, scaling, False), sequences, (q, k, v), found)
    return found[0], found[1].t().contiguous()


def cudnn_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention.

    Args:
        grad: [queries, heads, dim] gradient of ``out``.
        q: as for ``cudnn_forward``.
        k: likewise.
        v: likewise.
        out: [queries, heads, dim].
        lse: [heads, queries] float32, the log of each query's sum of exponentials.
        sequences: which keys a query attends to.
        scaling: factor on the scores.

    Returns:
        of q, k and v.
    """
    found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _run(_Shape.of(q, k, sequences, scaling, True), sequences, (q, k, v, out, grad, lse.t().contiguous()), found)
    return found


def _run(shape: _Shape, sequences: Sequences, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    graph = _graph(shape)
    workspace = torch.empty(graph.workspace, dtype=torch.uint8, device=shape.device)
    handle = _handle(shape.device)
    graph.cudnn.set_stream(handle, torch.cuda.current_stream(shape.device).cuda_stream)
    tensors = (*inputs, *_offsets(sequences, shape), *outputs)
    graph.graph.execute(dict(enumerate(tensors, 1)), workspace, handle=handle)


@dataclass(frozen=True)
class _Shape:
    """What a graph is built for; numbers and lengths are upper bounds."""

    device: torch.device
    dtype: torch.dtype
    sequences: int
    heads: int
    kv_heads: int
    width: int
    longest_query: int
    longest_key: int
    queries: int
    keys: int
    causal: bool
    scaling: float
    backward: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, sequences: Sequences, scaling: float, backward: bool) -> _Shape:
        """Round the shapes of a call up."""
        return cls(
            device=q.device,
            dtype=q.dtype,
            sequences=_round_up(len(sequences.queries) - 1, 32),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            width=q.shape[2],
            longest_query=_round_up(sequences.longest_query, 64),
            longest_key=_round_up(sequences.longest_key, 64),
            queries=_round_up(len(q), 4096),
            keys=_round_up(len(k), 4096),
            causal=sequences.causal,
            scaling=scaling,
            backward=backward,
        )


@dataclass(frozen=True)
class _Graph:
    """A graph, the module, and the bytes of its workspace."""

    graph: Any
    cudnn: Any
    workspace: int


def _round_up(number: int, least: int) -> int:
    """Round up to a multiple of ``least``, or of an eighth of the next power of two if that is more."""
    step = max(least, 1 << max(number.bit_length() - 3, 0))
    return -(-number // step) * step


def _offsets(sequences: Sequences, shape: _Shape) -> tuple[Tensor, ...]:
    """Return where each sequence starts in elements (queries, keys, log-sum-exps) and its lengths (queries, keys), all int32."""
    key = (shape.sequences, shape.heads, shape.kv_heads, shape.width)
    found: tuple[Tensor, ...] | None = sequences.offsets.get(key)
    if found is None:
        missing = shape.sequences + 1 - len(sequences.queries)
        queries, keys = (torch.cat([ends, ends[-1:].expand(missing)]) for ends in (sequences.queries, sequences.keys))
        found = (
            queries * (shape.heads * shape.width),
            keys * (shape.kv_heads * shape.width),
            queries * shape.heads,
            queries.diff(),
            keys.diff(),
        )
        sequences.offsets[key] = found
    return found


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@lru_cache(256)
def _graph(shape: _Shape) -> _Graph:
    import cudnn

    number = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[shape.dtype]
    real, whole = cudnn.data_type.FLOAT, cudnn.data_type.INT32
    graph = cudnn.pygraph(
        io_data_type=number, intermediate_data_type=real, compute_data_type=real, handle=_handle(shape.device)
    )
    count = shape.sequences

    def tensor(name: str, dim: list[int], stride: list[int], dtype: Any, offset: Any = None) -> Any:
        made = graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype)
        if offset is not None:
            made.set_ragged_offset(offset)
        return made

    def vector(name: str, length: int) -> Any:
        return tensor(name, [length, 1, 1, 1], [1, 1, 1, 1], whole)

    def heads(number_of: int, longest: int) -> tuple[list[int], list[int]]:
        row = number_of * shape.width
        return [count, number_of, longest, shape.width], [longest * row, shape.width, row, 1]

    of_queries, of_keys, of_sums = (vector(name, count + 1) for name in ("queries", "keys", "sums"))
    query_lengths, key_lengths = vector("query_lengths", count), vector("key_lengths", count)
    longest = shape.longest_query
    q_like, k_like = heads(shape.heads, longest), heads(shape.kv_heads, shape.longest_key)
    sums_like = [count, shape.heads, longest, 1], [longest * shape.heads, 1, shape.heads, 1]
    q = tensor("q", *q_like, number, of_queries)
    k, v = (tensor(name, *k_like, number, of_keys) for name in ("k", "v"))
    common = {
        "attn_scale": shape.scaling,
        "use_padding_mask": True,
        "seq_len_q": query_lengths,
        "seq_len_kv": key_lengths,
        "use_causal_mask": shape.causal,
    }
    inputs = [q, k, v]
    if shape.backward:
        out, grad = (tensor(name, *q_like, number, of_queries) for name in ("out", "grad"))
        sums = tensor("lse", *sums_like, real, of_sums)
        inputs += [out, grad, sums]
        common |= {"max_total_seq_len_q": shape.queries, "max_total_seq_len_kv": shape.keys}
        results = graph.sdpa_backward(q=q, k=k, v=v, o=out, dO=grad, stats=sums, **common)
        like = [(q_like, number, of_queries), (k_like, number, of_keys), (k_like, number, of_keys)]
    else:
        results = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **common)
        like = [(q_like, number, of_queries), (sums_like, real, of_sums)]
    for result, (layout, dtype, offset) in zip(results, like, strict=True):
        result.set_output(True).set_dim(layout[0]).set_stride(layout[1]).set_data_type(dtype).set_ragged_offset(offset)
    vectors = (of_queries, of_keys, of_sums, query_lengths, key_lengths)
    for uid, each in enumerate((*inputs, *vectors, *results), 1):
        each.set_uid(uid)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return _Graph(graph, cudnn, max(graph.get_workspace_size(), 1))
