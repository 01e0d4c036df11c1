"""Keeps SGLang's record of routed experts in GPU memory. Runs inside SGLang's schedulers.

SGLang copies the expert indices of every forward pass to host memory and sorts them into a table with a row for each slot of the cache. A
decode step of some milliseconds waits for both copies, and for the CPU's writes. Here the table is in GPU memory, in the dtype in which
records are sent, and a pass writes its rows on the GPU with one kernel. Records are copied to the host when their requests have finished: one
copy for all requests that finish in the same step, on a stream that does not wait for the next step, which already runs.

The table has one byte per cached token, layer and expert of a token (with at most 256 experts), some thousandths of the cached keys and values.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: A request whose record is to be read, the slots of all requests, and the range of its own in them.
_Finished = tuple[Any, Tensor, int, int]


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
        buffer = recorder.device_cache.buffer
        self.rows = torch.zeros(recorder.host_cache.buffer.shape, dtype=dtype, device=buffer.device)
        recorder.device_cache.buffer = torch.zeros_like(buffer, dtype=dtype)  # a pass converts as it records
        recorder.host_cache = None
        recorder.on_forward_end, recorder.get_topk = self.write, self.read
        self._finished: list[_Finished] = []
        self._stream = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None
        self._processed = torch.cuda.Event() if buffer.is_cuda else None

    def write(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None, no_copy_to_cpu: bool = False
    ) -> None:
        """Write the experts of a forward pass to the slots of its tokens. Called on the stream of the pass."""
        chosen = self.recorder._get_local_slice(forward_batch, can_run_graph, cuda_graph_batch)
        self.rows.index_copy_(0, forward_batch.out_cache_loc.long(), chosen)

    def read(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Tensor:
        """Return the record of a request, [tokens, layers, experts per token] on the CPU, from its token ``start_len`` to the last but one.

        Raises:
            ValueError: ``start_len`` is negative.
        """
        if start_len < 0:
            raise ValueError(f"start_len is {start_len}, and must not be negative")
        slots = req_to_token_pool.req_to_token[req_pool_idx, min(start_len, seqlen - 1) : seqlen - 1]
        return self.rows.index_select(0, slots.long()).cpu()

    def finish(self, request: Any, req_to_token_pool: Any) -> None:
        """Note a request that has finished; ``collect`` reads its record."""
        last = len(request.origin_input_ids) + len(request.output_ids_through_stop) - 1
        slots = req_to_token_pool.req_to_token
        row = int(request.req_pool_idx) * slots.shape[1]
        self._finished.append((request, slots, row + min(request.routed_experts_start_len, last), row + last))

    def collect(self) -> list[Any]:
        """Set ``routed_experts`` of the requests noted since the last call, and return them. Called when the results of a pass are processed.
        The records are views of one tensor.

        That pass has written its rows, and the next one, which already runs, writes to other slots. It was launched after the slots of these
        requests had been entered, except where processing the previous results replaced a slot by another one of the same prompt. The
        stream therefore waits for the event that was recorded then, and not for the next pass.
        """
        finished, self._finished = self._finished, []
        if finished:
            requests, slots, starts, ends = zip(*finished, strict=True)
            lengths = np.subtract(ends, starts)
            places = np.arange(lengths.sum()) + np.repeat(ends - lengths.cumsum(), lengths)
            records = self._read_all(slots[0], torch.from_numpy(places)).split(lengths.tolist())
            for request, record in zip(requests, records, strict=True):
                request.routed_experts = record
        if self._processed is not None:
            self._processed.record()
        return [request for request, *_ in finished]

    def _read_all(self, slots: Tensor, places: Tensor) -> Tensor:
        """Return the rows of the slots at flat ``places`` of ``slots`` [requests, tokens], on the CPU."""
        if self._stream is not None and self._processed is not None:
            self._stream.wait_event(self._processed)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            found = slots.view(-1).index_select(0, places.to(slots.device))
            return self.rows.index_select(0, found.long()).cpu()


#: The table of this process's scheduler; None if SGLang records in host memory or not at all.
_table: RouteTable | None = None


def table() -> RouteTable | None:
    """Return the table of this process's scheduler; None if SGLang records in host memory or not at all."""
    return _table


def keep_on_gpu(runner: Any, dtype: str) -> RouteTable | None:
    """Replace the recorder's table in host memory after SGLang made it. None if there is no recorder, or the model runs on a CPU."""
    global _table
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    recorder = get_global_experts_capturer()
    if recorder is None or runner.is_draft_worker or not recorder.device_cache.buffer.is_cuda:
        return None
    _table = RouteTable(recorder, getattr(torch, dtype))
    return _table
