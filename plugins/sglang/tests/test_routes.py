"""The table of routed experts that replaces SGLang's, on stand-ins for its recorder and its batches."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from miles_sglang.routes import RouteTable, keep_on_gpu

SLOTS, LAYERS, K = 12, 3, 2


class Recorder:
    """As ``BaseTopkCapturer``: experts of the current pass in a buffer, and a table in host memory."""

    def __init__(self) -> None:
        self.device_cache = types.SimpleNamespace(buffer=torch.zeros(8, LAYERS, K + 1, dtype=torch.int32))
        self.host_cache: Any = types.SimpleNamespace(buffer=torch.zeros(SLOTS, LAYERS, K, dtype=torch.int32))

    def _get_local_slice(self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None) -> torch.Tensor:
        return self.device_cache.buffer[: len(forward_batch.out_cache_loc), :, :K]  # without shared experts

    on_forward_end: Any = None
    get_topk: Any = None


def run_pass(recorder: Recorder, slots: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, 256, (len(slots), LAYERS, K + 1), generator=generator, dtype=torch.int32)
    recorder.device_cache.buffer[: len(slots)] = chosen
    batch = types.SimpleNamespace(out_cache_loc=torch.tensor(slots, dtype=torch.int32))
    left = recorder.on_forward_end(forward_batch=batch, can_run_graph=True, cuda_graph_batch=None, no_copy_to_cpu=True)
    assert left is None  # nothing is left to copy to host memory
    return chosen[:, :, :K]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_a_request_gets_the_experts_of_its_tokens_from_all_passes(dtype: torch.dtype) -> None:
    recorder = Recorder()
    table = RouteTable(recorder, dtype)
    assert recorder.host_cache is None and table.rows.dtype == dtype
    prompt = run_pass(recorder, [4, 9, 2], seed=0)  # two requests share the prompt in slots 4 and 9
    first, second = run_pass(recorder, [7, 3], seed=1), run_pass(recorder, [1, 11], seed=2)
    pool = types.SimpleNamespace(
        req_to_token=torch.tensor([[4, 9, 7, 1, 5, 0], [4, 9, 3, 11, 6, 0]], dtype=torch.int32)
    )
    for request in range(2):
        found = recorder.get_topk(req_pool_idx=request, seqlen=5, req_to_token_pool=pool, start_len=0)
        expected = torch.stack([prompt[0], prompt[1], first[request], second[request]])
        assert torch.equal(found.int(), expected) and found.device.type == "cpu"
        assert torch.equal(recorder.get_topk(request, 5, pool, 2).int(), expected[2:])
        assert not len(recorder.get_topk(request, 5, pool, 9))
    with pytest.raises(ValueError, match="start_len is -1"):
        recorder.get_topk(0, 5, pool, -1)


def test_a_model_on_a_cpu_or_without_records_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder: Recorder | None = Recorder()
    module = types.ModuleType("sglang.srt.state_capturer.routed_experts")
    module.get_global_experts_capturer = lambda: recorder  # type: ignore[attr-defined]
    names = module.__name__.split(".")
    for end in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), types.ModuleType(".".join(names[:end])))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    runner = types.SimpleNamespace(is_draft_worker=False)
    assert keep_on_gpu(runner, "uint8") is None and recorder is not None and recorder.host_cache is not None
    recorder = None
    assert keep_on_gpu(runner, "uint8") is None
