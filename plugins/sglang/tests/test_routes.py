"""The table of routed experts that replaces SGLang's, on stand-ins for its recorder and its batches."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from miles_sglang import inside, routes
from miles_sglang.routes import RouteTable, keep_on_gpu

SLOTS, LAYERS, K = 12, 3, 2
#: As the output streamer of the scheduler that sends, and of another one of the same engine.
SENDER, SILENT = (types.SimpleNamespace(send_to_detokenizer=types.SimpleNamespace(socket=s)) for s in (object(), None))


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


class Counted(TorchDispatchMode):
    """Counts the operations of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def finished(row: int, tokens: int, start: int = 0) -> Any:
    return types.SimpleNamespace(
        origin_input_ids=[5, 5],
        output_ids_through_stop=[7] * (tokens - 2),
        routed_experts_start_len=start,
        req_pool_idx=row,
        return_routed_experts=True,
        routed_experts=None,
    )


def test_requests_that_finish_in_one_step_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    table, recorder = RouteTable(made := Recorder(), torch.uint8), made
    monkeypatch.setattr(routes, "_table", table)
    run_pass(recorder, [4, 9, 2], seed=0)
    run_pass(recorder, [7, 3], seed=1)
    pool = types.SimpleNamespace(
        req_to_token=torch.tensor([[4, 9, 7, 0], [4, 9, 3, 0], [2, 0, 0, 0]], dtype=torch.int32)
    )
    processor = types.SimpleNamespace(req_to_token_pool=pool)
    requests = [finished(0, 4), finished(1, 4, start=2), finished(2, 2), finished(1, 2, start=9)]
    lengths = (4, 4, 2, 2)
    alone = [
        recorder.get_topk(r.req_pool_idx, length, pool, r.routed_experts_start_len)
        for r, length in zip(requests, lengths, strict=True)
    ]
    for request in requests:
        inside.complete_routes(lambda *_: pytest.fail("SGLang read a record by itself"), processor, request)
    with Counted() as counted:
        inside.send_routes(SENDER, requests, True)
    assert [r.routed_experts.tobytes() for r in requests] == [one.numpy().tobytes() for one in alone]
    assert counted.operations.count("index_select") == 2  # slots and rows of all of them
    unasked = finished(0, 4)
    unasked.return_routed_experts = False
    inside.complete_routes(lambda *_: pytest.fail("SGLang read a record by itself"), processor, unasked)
    inside.send_routes(SENDER, requests, True)
    assert unasked.routed_experts is None and not table.collect()


def test_rows_of_a_retracted_request_precede_those_of_the_second_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    table, recorder = RouteTable(made := Recorder(), torch.uint8), made
    monkeypatch.setattr(routes, "_table", table)
    run_pass(recorder, [4, 9, 7], seed=0)
    pool = types.SimpleNamespace(req_to_token=torch.tensor([[4, 9, 7, 0]], dtype=torch.int32))
    request = finished(0, 4)
    request.miles_routes = torch.full((2, LAYERS, K), 77, dtype=torch.uint8)
    inside.complete_routes(lambda *_: None, types.SimpleNamespace(req_to_token_pool=pool), request)
    inside.send_routes(SENDER)
    found = torch.frombuffer(bytearray(request.routed_experts.tobytes()), dtype=torch.uint8).view(3, LAYERS, K)
    assert bool((found[:2] == 77).all()) and torch.equal(found[2], table.rows[7])


def test_a_pass_writes_its_rows_with_one_operation() -> None:
    """A decode step of a small model is bound by the scheduler's time, and each operation takes some microseconds of it."""
    recorder = Recorder()
    RouteTable(recorder, torch.uint8)
    batch = types.SimpleNamespace(out_cache_loc=torch.tensor([4, 9]))
    with Counted() as counted:
        recorder.on_forward_end(forward_batch=batch, can_run_graph=True, cuda_graph_batch=None, no_copy_to_cpu=True)
    assert [name for name in counted.operations if name != "slice"] == ["index_copy_"]


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
