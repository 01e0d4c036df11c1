"""Keeps SGLang's record of routed experts in GPU memory. Runs inside SGLang's schedulers.

SGLang copies the expert indices of every forward pass to host memory and sorts them into a table with a row for each slot of the cache. A
decode step of some milliseconds waits for both copies, and for the CPU's writes. Here the table is in GPU memory, in the dtype in which
records are sent, and a pass writes its rows on the GPU. The rows of a request are copied to the host once, when it has finished.

The table has one byte per cached token, layer and expert of a token (with at most 256 experts), some thousandths of the cached keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RouteTable:
    """The table that replaces the one in host memory; two methods of SGLang's recorder become its own.

    Args:
        recorder: SGLang's ``RoutedExpertsCapturer``.
        dtype: dtype of the table.

    Attributes:
        rows: [slots of the cache, layers, experts per token].
    """

    def __init__(self, recorder: Any, dtype: torch.dtype) -> None:
        self.recorder = recorder
        device = recorder.device_cache.buffer.device
        self.rows = torch.zeros(recorder.host_cache.buffer.shape, dtype=dtype, device=device)
        recorder.host_cache = None
        recorder.on_forward_end, recorder.get_topk = self.write, self.read

    def write(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None, no_copy_to_cpu: bool = False
    ) -> None:
        """Write the experts of a forward pass to the slots of its tokens. Called on the stream of the pass."""
        chosen = self.recorder._get_local_slice(forward_batch, can_run_graph, cuda_graph_batch)
        self.rows.index_copy_(0, forward_batch.out_cache_loc.long(), chosen.to(self.rows.dtype))

    def read(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Tensor:
        """Return the record of a request, [tokens, layers, experts per token] on the CPU, from its token ``start_len`` to the last but one.

        Raises:
            ValueError: ``start_len`` is negative.
        """
        if start_len < 0:
            raise ValueError(f"start_len is {start_len}, and must not be negative")
        slots = req_to_token_pool.req_to_token[req_pool_idx, min(start_len, seqlen - 1) : seqlen - 1]
        return self.rows.index_select(0, slots.long()).cpu()


def keep_on_gpu(runner: Any, dtype: str) -> RouteTable | None:
    """Replace the recorder's table in host memory after SGLang made it. None if there is no recorder, or the model runs on a CPU."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    recorder = get_global_experts_capturer()
    if recorder is None or runner.is_draft_worker or not recorder.device_cache.buffer.is_cuda:
        return None
    return RouteTable(recorder, getattr(torch, dtype))
