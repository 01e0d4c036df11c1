"""Attention over packed sequences, computed by cuDNN through its Python package (``nvidia-cudnn-frontend``).

cuDNN builds a graph for upper bounds of the shapes, which takes some 50 ms. The bounds are rounded up, so that micro-batches share graphs;
sequences without tokens fill up their number. PyTorch's operator for it is not used: in torch 2.11 it builds a graph at every call, and
its gradients of packed sequences are wrong.
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

#: Elements of the queries times the most keys of one, from which on cuDNN is faster than FlashAttention-2 on an H200. Below, the host takes
#: longer to launch a graph than the GPU to compute it.
_LEAST_WORK = 1 << 32
#: cuDNN's names of the inputs. A forward pass takes only the first three.
_INPUTS = ("q", "k", "v", "o", "dO", "stats")
#: Largest offset of a sequence in elements: offsets are int32.
_FARTHEST = 2**31 - 1


@cache
def cudnn_runs(device: torch.device) -> bool:
    """Whether cuDNN computes attention on a device: a GPU of the generation Hopper or later, and the package is installed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    if importlib.util.find_spec("cudnn") is None:
        log.info(
            "training on long sequences is faster with cuDNN's attention: pip install --no-deps nvidia-cudnn-frontend"
        )
        return False
    try:
        _handle(device)
    except Exception as error:  # another version of cuDNN, a driver that is too old
        log.warning("cuDNN cannot be used, so attention is computed by FlashAttention-2: %s", first_line(error))
        return False
    return True


def cudnn_supports(q: Tensor, k: Tensor, sequences: Sequences, scaling: float) -> bool:
    """Whether cuDNN should compute this attention and its gradients: it can, and there is enough to compute. It adds gradients in no fixed
    order, as deterministic algorithms have to. Arguments as for ``cudnn_forward``."""
    return (
        q.numel() * sequences.longest_key >= _LEAST_WORK
        and max(q.numel(), k.numel()) <= _FARTHEST
        and not torch.are_deterministic_algorithms_enabled()
        and cudnn_runs(q.device)
        and all(_graph(_Shape.of(q, k, sequences, scaling, backward)) is not None for backward in (False, True))
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
    assert graph is not None  # cudnn_supports
    workspace = torch.empty(graph.workspace, dtype=torch.uint8, device=shape.device)
    handle = _handle(shape.device)
    graph.cudnn.set_stream(handle, _stream(shape.device))
    tensors = (*inputs, *_offsets(sequences, shape), *outputs)
    graph.graph.execute(dict(enumerate(tensors, 1)), workspace, handle=handle)


@dataclass(frozen=True)
class _Shape:
    """What a graph is built for; numbers and lengths are upper bounds. ``square``: every sequence has as many keys as queries. ``queries`` and
    ``keys`` limit the workspace of a backward pass."""

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
    square: bool
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
            queries=_round_up(len(q), 4096) if backward else 0,
            keys=_round_up(len(k), 4096) if backward else 0,
            causal=sequences.causal,
            square=sequences.keys is sequences.queries,
            scaling=scaling,
            backward=backward,
        )

    def layout(self, heads: int, longest: int) -> tuple[list[int], list[int]]:
        """Return size and strides of rows [heads, width] of sequences."""
        row = heads * self.width
        return [self.sequences, heads, longest, self.width], [longest * row, self.width, row, 1]


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


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@lru_cache(256)
def _graph(shape: _Shape) -> _Graph | None:
    """Build a graph; None if cuDNN has no kernel for it."""
    import cudnn

    try:
        graph = _declare(shape, cudnn)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
        log.warning("FlashAttention-2 computes attention of %s, because cuDNN cannot: %s", shape, first_line(error))
        return None
    return _Graph(graph, cudnn, max(graph.get_workspace_size(), 1))


def _declare(shape: _Shape, cudnn: Any) -> Any:
    """Return the graph of an attention; the numbers of its tensors are their places in the arguments of ``_run``."""
    half, real = _type(shape.dtype, cudnn), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=half, intermediate_data_type=real, compute_data_type=real, handle=_handle(shape.device)
    )

    def tensor(name: str, like: tuple[list[int], list[int]], dtype: Any, offset: Any = None) -> Any:
        made = graph.tensor(name=name, dim=like[0], stride=like[1], data_type=dtype)
        return made if offset is None else made.set_ragged_offset(offset)

    whole, count, longest = cudnn.data_type.INT32, shape.sequences, shape.longest_query
    starts, lengths = ([count + 1, 1, 1, 1], [1] * 4), ([count, 1, 1, 1], [1] * 4)
    of_queries, of_keys, of_sums = (tensor(name, starts, whole) for name in ("of_queries", "of_keys", "of_sums"))
    query_lengths, key_lengths = (tensor(name, lengths, whole) for name in ("query_lengths", "key_lengths"))
    q_like, k_like = shape.layout(shape.heads, longest), shape.layout(shape.kv_heads, shape.longest_key)
    sums_like = [count, shape.heads, longest, 1], [longest * shape.heads, 1, shape.heads, 1]
    inputs = [tensor("q", q_like, half, of_queries)]
    inputs += [tensor(name, k_like, half, of_keys) for name in ("k", "v")]
    common = {
        "attn_scale": shape.scaling,
        "use_padding_mask": True,
        "seq_len_q": query_lengths,
        "seq_len_kv": key_lengths,
    }
    if shape.causal:
        ends = cudnn.diagonal_alignment
        common |= {
            "diagonal_alignment": ends.TOP_LEFT if shape.square else ends.BOTTOM_RIGHT,
            "diagonal_band_right_bound": 0,
        }
    if shape.backward:
        inputs += [tensor(name, q_like, half, of_queries) for name in ("out", "grad")]
        inputs += [tensor("sums", sums_like, real, of_sums)]
        most = {"max_total_seq_len_q": shape.queries, "max_total_seq_len_kv": shape.keys}
        results = graph.sdpa_backward(**dict(zip(_INPUTS, inputs, strict=True)), **common, **most)
        like = [(q_like, half, of_queries), (k_like, half, of_keys), (k_like, half, of_keys)]
    else:
        results = graph.sdpa(**dict(zip(_INPUTS, inputs, strict=False)), generate_stats=True, **common)
        like = [(q_like, half, of_queries), (sums_like, real, of_sums)]
    for result, (layout, dtype, offset) in zip(results, like, strict=True):
        result.set_output(True).set_dim(layout[0]).set_stride(layout[1]).set_data_type(dtype).set_ragged_offset(offset)
    for uid, each in enumerate((*inputs, of_queries, of_keys, of_sums, query_lengths, key_lengths, *results), 1):
        each.set_uid(uid)
    return graph


def _type(dtype: torch.dtype, cudnn: Any) -> Any:
    return {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
