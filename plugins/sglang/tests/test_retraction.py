"""Requests that continue with new weights, on stand-ins for SGLang's scheduler; ``test_contract.py`` uses SGLang itself."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang_scheduler_double import SchedulerModel

from miles_core.engine import Request, Sampling
from miles_core.plugin import MilesError
from miles_sglang import inside, retraction
from miles_sglang.answers import Answer
from miles_sglang.responses import Translator
from miles_sglang.retraction import VERSIONS, TokenVersions
from miles_workers import ROUTED_EXPERTS, Routing


def request(count: int, prompt: int = 2, **more: Any) -> Any:
    made = types.SimpleNamespace(output_ids=[7] * count, origin_input_ids=[5] * prompt, **more)
    retraction.begin_request(None, made)
    return made


@pytest.fixture
def scheduler() -> Any:
    made = types.SimpleNamespace(
        server_args=types.SimpleNamespace(weight_version="3"), waiting_queue=[], _engine_paused=False
    )
    retraction.keep_scheduler(None, made)
    return made


def update(version: str | None, success: bool = True) -> None:
    retraction.begin_version(
        types.SimpleNamespace(success=success), None, types.SimpleNamespace(weight_version=version)
    )


def test_tokens_before_and_after_each_update_have_their_own_version(scheduler: Any) -> None:
    first, untouched, late = request(0), request(4), request(0)
    scheduler.waiting_queue = [first, late]
    first.output_ids += [7] * 5
    update(None)  # a bucket before the last one
    update("9", success=False)
    update("4")
    first.output_ids += [7] * 2
    late.output_ids += [7]
    update("5")
    update("6")  # two updates without a token between them
    scheduler.waiting_queue = []
    update("7")
    versions = first.customized_info[VERSIONS]
    assert versions[0:9] == [3] * 5 + [4] * 2 + [6] * 2
    assert versions[4:6] == [3, 4] and versions[6:9] == [4, 6, 6] and versions[3:3] == [] and versions[0:2] == [3, 3]
    assert untouched.customized_info[VERSIONS][0:4] == [3] * 4
    assert late.customized_info[VERSIONS][0:3] == [4, 6, 6]
    assert request(0).customized_info[VERSIONS][0:1] == [7]


@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("stop", range(7))
def test_every_slice_is_that_of_a_list(start: int, stop: int) -> None:
    versions, plain = TokenVersions(0), [0, 0, 1, 1, 1, 4, 4]
    versions.begin(2, 1)
    versions.begin(5, 4)
    assert versions[start:stop] == plain[start:stop]


def test_a_paused_scheduler_flushes_although_requests_wait(scheduler: Any) -> None:
    seen: list[int] = []

    def flush(scheduler: Any, empty_cache: bool) -> bool:
        seen.append(len(scheduler.waiting_queue))
        return not scheduler.waiting_queue

    waiting = scheduler.waiting_queue = [request(1)]
    assert not retraction.flush_cache(flush, scheduler, empty_cache=True)
    scheduler._engine_paused = True
    assert retraction.flush_cache(flush, scheduler, empty_cache=True) and scheduler.waiting_queue is waiting
    assert seen == [1, 0]


def test_experts_of_tokens_sampled_before_a_retraction_are_kept(scheduler: Any, monkeypatch: Any) -> None:
    rows = torch.zeros(99, 1, 1, dtype=torch.int32)
    capturer = types.SimpleNamespace(get_topk=lambda slot, length, pool, start: rows[start : length - 1].clone())
    module = types.SimpleNamespace(get_global_experts_capturer=lambda: capturer)
    monkeypatch.setitem(sys.modules, "sglang.srt.state_capturer.routed_experts", module)
    monkeypatch.setenv(inside.VARIABLE, "uint8")

    def retract(made: Any) -> None:
        retraction.keep_routes(req=made, req_to_token_pool=None, offload_kv=False)

    made = request(3, return_routed_experts=True, req_pool_idx=0, routed_experts_start_len=0, routed_experts=None)
    fresh = request(0, return_routed_experts=True, req_pool_idx=0, routed_experts_start_len=0, routed_experts=None)
    retract(made)
    retract(fresh)
    rows += 1  # another computation of all tokens
    made.output_ids += [7] * 2
    retract(made)
    rows += 1
    made.output_ids += [7]
    for each in (made, fresh):
        inside.complete_routes(lambda _, r: setattr(r, "routed_experts", capturer.get_topk(0, 8, None, 0)), None, each)
    sender = types.SimpleNamespace(send_to_detokenizer=types.SimpleNamespace(socket=object()))
    inside.send_routes(sender)
    assert list(made.routed_experts.tobytes()) == [0] * 4 + [1] * 2 + [2]
    assert list(fresh.routed_experts.tobytes()) == [2] * 7
    without = request(3, return_routed_experts=False)
    retract(without)
    assert not hasattr(without, "miles_routes")


def answer(tokens: int, versions: list[int] | None, finish: str, rows: int = 0) -> Answer:
    columns = {"tokens": np.arange(tokens, dtype=np.int32), "log_probs": np.zeros(tokens, np.float32)}
    if versions is not None:
        columns["versions"] = np.array(versions, np.int32)
    if rows:
        columns["routes"] = np.zeros(rows, np.int32)
    return Answer({"finish_reason": {"type": finish}, "weight_version": "8"}, columns)


def test_responses_have_a_span_for_each_version() -> None:
    asked = Request([1, 2], Sampling(9), key=0, extras={ROUTED_EXPERTS})
    routing = Routing("int32", 1, (0,), 1)
    translator = Translator(str, 64, 9, routing=routing, versioned=True)
    found = translator.response(asked, answer(5, [3, 3, 4, 4, 8], "stop", rows=6), 9)
    assert found.weight_versions == [(0, 3), (2, 4), (4, 8)] and len(found.extras[ROUTED_EXPERTS]) == 6
    found = translator.response(asked, answer(5, [3, 3, 4, 4, 8], "abort", rows=4), 9)  # one row less than tokens
    assert found.weight_versions == [(0, 3), (2, 4)] and len(found.tokens) == len(found.log_probs) == 3
    waiting = translator.response(asked, answer(5, None, "abort"), 9)  # aborted in SGLang's queue
    assert (waiting.tokens, waiting.weight_versions, waiting.finish) == ([], [], "abort")
    with pytest.raises(MilesError, match="weight versions for 0 of 5 tokens"):
        translator.response(asked, answer(5, None, "stop"), 9)
    assert Translator(str, 64, 9).response(
        Request([1], Sampling(9), key=0), answer(2, None, "stop"), 9
    ).weight_versions == [(0, 8)]


def test_versions_cross_the_processes() -> None:
    given = {"output_ids": [1, 2], "meta_info": {VERSIONS: [3, 4], "weight_version": "4"}}
    message, columns = Answer.from_sglang(given).message()
    assert Answer.read(message, b"".join(columns)).columns["versions"].tolist() == [3, 4]


LONG = """
async def generate(args, sample, sampling_params):
    length = 60 if sample.group_index == 1 else 2
    answer = await args.generate(sample.tokens, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})
    sample.tokens = sample.tokens + answer.tokens
    sample.response, sample.response_length = answer.text, len(answer.tokens)
    return sample
"""


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_a_run_sends_no_request_again(mode: str, toy_run: Any, sglang_with: Any, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(LONG)
    links = sglang_with(SchedulerModel)
    run = toy_run(
        ["r3", "tis"],
        family="qwen3_moe",
        engine="sglang",
        device="cpu",
        steps=6,
        schedule="async",
        stale_samples="train",
        pause_generation_mode=mode,
        custom_generate_function_path=tmp_path / "long.py",
    )
    long = [s for s in run.samples if s["response_length"] == 60]
    assert len(long) == 4
    for sample in long:
        versions = [version for _, version in sample["weight_versions"]]
        assert len(versions) > 1 and versions == sorted(set(versions))
    longest = max(len(s["tokens"]) - s["response_length"] for s in run.samples)
    resent = [length for length in links[0].manager.asked if length > longest]
    assert bool(resent) is (mode == "abort")
