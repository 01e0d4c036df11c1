"""Several running servers as one engine, on doubles of SGLang's HTTP server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang_server_double import SafeUnpickler, ServerDouble

import miles_sglang
from miles_core.config.load import load
from miles_core.engine import Request, Sampling
from miles_core.plugin import ConfigError, PlanError, Policy
from miles_formats import Codec
from miles_sglang import build, tensor_messages
from miles_sglang.buckets import Bucket
from miles_sglang.build import assemble
from miles_sglang.choices import Choices
from miles_sglang.engine import SglangEngine
from miles_testing import tiny_checkpoint
from miles_testing.doubles.server import starting, write_list
from miles_testing.engine_contract import stored_units
from miles_workers.servers import ServerError, pool

Start = Callable[..., ServerDouble]
LONG = Sampling(60, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("pool")
    return [tiny_checkpoint("qwen3_moe", root / str(seed), seed) for seed in range(2)]


@pytest.fixture
def start(checkpoints: list[Path], monkeypatch: Any) -> Iterator[Start]:
    """Starts a server with the first checkpoint."""
    monkeypatch.setattr(miles_sglang, "plugin", replace(miles_sglang.plugin, packages=()))
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.02)
    with starting(partial(ServerDouble, checkpoints[0])) as start:
        yield start


@pytest.fixture
def listed(tmp_path: Path) -> Callable[..., str]:
    """Writes the file with the addresses of servers."""
    return partial(write_list, tmp_path)


def engine_for(checkpoint: Path, *url: str, **choices: Any) -> SglangEngine:
    given = {"device": "cpu", "max_context": 120, "max_running_requests": 8, "startup_timeout": 0.1, **choices}
    return assemble(checkpoint, Codec(), str, checkpoint.parent / "work", Choices(url=url, **given))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def update(engine: SglangEngine, checkpoint: Path, version: int) -> None:
    await engine.pause("abort")
    await engine.update_weights(stored_units(checkpoint), version)
    await engine.resume()


async def ask(engine: SglangEngine, count: int, first: int = 0) -> list[Any]:
    """Long responses that the servers generate at the same time."""
    asked = [asyncio.ensure_future(engine.generate(Request([1, 2, 3], LONG, key=first + i))) for i in range(count)]
    await asyncio.sleep(0)
    return asked


def when(condition: Callable[[], Any], act: Callable[[], Any]) -> threading.Thread:
    """Call ``act`` in a thread once ``condition`` holds."""

    def run() -> None:
        while not condition():
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("schedule", ["sync", pytest.param("async", marks=pytest.mark.thorough)])
def test_a_run_survives_a_death_and_uses_a_server_that_joins_late(
    start: Start, listed: Callable[..., str], toy_run: Any, caplog: Any, schedule: str
) -> None:
    """With routing replay, and with ``async`` responses that continue after an update, maybe on another server."""
    caplog.set_level("INFO")
    routed = {"enable_return_routed_experts": True}
    first, second, late = start(**routed), start(**routed), start(**routed)
    url = listed(first, second)
    second.fatal["generate"] = 20  # in the first rollout: before it, the checks of the first sync call both servers
    changed = when(lambda: second.dead, lambda: listed(first, late))
    options = {"hf_checkpoint": first.manager.checkpoint, "engine": "sglang", "device": "cpu", "sglang_url": url}
    if schedule == "async":
        options |= {"partial_rollout": True, "rollout_max_response_len": 80}
    run = toy_run(["r3", "tis"], steps=7, schedule=schedule, verify_logprobs=True, **options)
    assert not changed.is_alive()
    assert all(step["verify/abs_log_prob"] < 1e-4 for step in run.metrics)
    total = {n: sum(step[f"sglang/{n}"] for step in run.metrics) for n in ("joined", "left", "retried_requests")}
    assert (total["joined"], total["left"]) == (1, 1) and total["retried_requests"] >= 1
    assert run.metrics[-1]["sglang/servers"] == 2 and late.calls["generate"] > 1
    assert int(late.manager.version) == int(first.manager.version) == 7
    assert f"{second.url} left (" in caplog.text and f"{late.url} joined with version" in caplog.text
    versions = [[v for _, v in sample["weight_versions"]] for sample in run.samples]
    if schedule == "sync":
        assert all(step["mismatch/abs_log_prob"] < 1e-4 for step in run.metrics)
        assert run.metrics[-1]["r3/tokens_differing"] == 0
        assert all(len(each) == 1 for each in versions)
    else:
        assert any(len(each) > 1 for each in versions) and all(each == sorted(set(each)) for each in versions)


def test_requests_go_to_the_server_with_the_fewest_and_calls_to_all(start: Start, checkpoints: list[Path]) -> None:
    servers = [start() for _ in range(3)]

    async def play() -> None:
        engine = engine_for(checkpoints[0], *(server.url for server in servers))
        await engine.start()
        try:
            await update(engine, checkpoints[1], 4)
            for server in servers:
                sent = load_file(checkpoints[1] / "model.safetensors")
                assert all(torch.equal(tensor, sent[name]) for name, tensor in server.manager.tensors.items())
            scores = await engine.score_each([[1, 2, 3, 4]])
            assert list(scores) == [server.url for server in servers]
            assert len({tuple(found.tolist()) for (found,) in scores.values()}) == 1
            before = [server.calls["generate"] for server in servers]
            asked = await ask(engine, 6)
            await until(lambda: all(s.calls["generate"] == b + 2 for s, b in zip(servers, before, strict=True)))
            await engine.abort([0, 1])
            assert [(await asked[i]).finish for i in range(2)] == ["abort", "abort"] and not asked[2].done()
            await engine.pause("abort")
            assert {task.result().finish for task in asked} == {"abort"}
            assert all(server.manager.paused for server in servers)
            await engine.resume()
            answer = await engine.generate(Request([1, 2], Sampling(3)))
            assert answer.weight_versions == [(0, 4)]
        finally:
            await engine.stop()

    asyncio.run(play())


@pytest.mark.parametrize("removed", [False, True])
def test_requests_of_a_server_that_leaves_are_answered_by_others(
    start: Start, listed: Callable[..., str], checkpoints: list[Path], removed: bool
) -> None:
    first, second = start(), start()
    url = listed(first, second)

    async def play() -> None:
        engine = engine_for(checkpoints[0], url)
        await engine.start()
        try:
            await update(engine, checkpoints[0], 0)
            asked = await ask(engine, 6)
            await until(lambda: second.calls["generate"] >= 3)
            listed(first) if removed else second.kill()
            answers = await asyncio.gather(*asked)
            assert all(len(answer.tokens) == 60 and answer.finish == "length" for answer in answers)
            assert engine.link.news is not None and engine.link.news.left == 1 and 1 <= engine.link.news.retried <= 3
            if removed:
                await until(lambda: second.calls["abort_request"] == engine.link.news.retried)
        finally:
            await engine.stop()

    asyncio.run(play())


def test_a_server_joins_with_the_weights_of_the_next_update(
    start: Start, listed: Callable[..., str], checkpoints: list[Path], caplog: Any
) -> None:
    """One whose weights are incomplete does not: its log-probs differ from those of the others."""
    caplog.set_level("INFO")
    first, late, wrong = start(), start(), start()
    wrong.manager.ignores = "down_proj"
    url = listed(first)

    async def play() -> None:
        engine = engine_for(checkpoints[0], url)
        await engine.start()
        try:
            await update(engine, checkpoints[0], 0)
            listed(first, late, wrong)
            await until(lambda: caplog.text.count("answers; it joins with the next weights") == 2)
            await asyncio.gather(*await ask(engine, 4))
            assert not late.calls["generate"]
            await update(engine, checkpoints[1], 1)
            assert f"{late.url} joined with version 1 of the weights; 2 servers" in caplog.text
            assert f"{wrong.url}: its log-probs differ from those of {first.url}" in caplog.text
            asked = wrong.calls["generate"]
            answers = await asyncio.gather(*await ask(engine, 4))
            assert {v for answer in answers for _, v in answer.weight_versions} == {1}
            assert late.calls["generate"] >= 2 and wrong.calls["generate"] == asked == 1
        finally:
            await engine.stop()

    asyncio.run(play())


def test_other_servers_take_over_with_the_learners_weights(
    start: Start, listed: Callable[..., str], checkpoints: list[Path]
) -> None:
    """All servers of the list are replaced between two updates."""
    first, second = start(), start()
    url = listed(first)

    async def play() -> None:
        engine = engine_for(checkpoints[0], url, max_restarts=1)

        async def resend() -> None:
            await engine.update_weights(stored_units(checkpoints[1]), 3)

        await engine.start()
        engine.resend = resend
        try:
            await update(engine, checkpoints[1], 3)
            asked = await ask(engine, 3)
            await until(lambda: first.calls["generate"] == 3)
            listed(second)
            answers = await asyncio.gather(*asked)
            assert all(len(answer.tokens) == 60 for answer in answers)
            assert {v for answer in answers for _, v in answer.weight_versions} == {3}
            assert second.calls["generate"] >= 3
        finally:
            await engine.stop()

    asyncio.run(play())


def test_the_last_server_that_dies_ends_the_run_with_one_sentence(start: Start, toy_run: Any) -> None:
    servers = [start(), start()]
    for server in servers:
        server.fatal["generate"] = 20
    options = {"hf_checkpoint": servers[0].manager.checkpoint, "engine": "sglang", "device": "cpu"}
    with pytest.raises(ServerError, match=r"no server is left: .*; start a server, and continue the run with --load"):
        toy_run([], steps=20, sglang_url=",".join(server.url for server in servers), **options)


def test_a_server_that_was_restarted_or_hangs_has_left(start: Start, checkpoints: list[Path], monkeypatch: Any) -> None:
    monkeypatch.setattr(pool, "HUNG_SECONDS", 0.5)
    good, restarted, hanging = start(), start(), start()

    async def play() -> None:
        engine = engine_for(checkpoints[0], good.url, restarted.url, hanging.url)
        await engine.start()
        try:
            await update(engine, checkpoints[0], 0)
            monkeypatch.setattr(pool, "LOOK_SECONDS", 60.0)  # the answer itself shows the version
            await asyncio.sleep(0.05)
            restarted.manager.version = "default"
            answers = await asyncio.gather(*await ask(engine, 3))
            assert all(answer.weight_versions == [(0, 0)] for answer in answers)
            assert engine.link.news is not None and engine.link.news.left == 1
        finally:
            await engine.stop()
        monkeypatch.setattr(pool, "LOOK_SECONDS", 0.02)
        restarted.manager.version = "-1"
        await engine.start()
        try:
            await update(engine, checkpoints[0], 0)
            hanging.hangs.set()
            asked = await ask(engine, 3)
            restarted.manager.version = "7"  # another run updates it
            answers = await asyncio.gather(*asked)
            assert all(answer.weight_versions == [(0, 0)] for answer in answers) and engine.link.news.serving == 1
        finally:
            await engine.stop()

    asyncio.run(play())


def test_a_server_that_refuses_an_update_leaves_later_and_ends_the_run_at_first(
    start: Start, checkpoints: list[Path], caplog: Any
) -> None:
    first, second = start(), start()

    async def play() -> None:
        engine = engine_for(checkpoints[0], first.url, second.url)
        await engine.start()
        try:
            second.refuses["update_weights_from_tensor"] = "no room"
            with pytest.raises(ServerError, match=f"{second.url}: update_weights_from_tensor answered 400: .*no room"):
                await update(engine, checkpoints[0], 0)
            second.refuses.clear()
            await update(engine, checkpoints[0], 0)
            second.refuses["update_weights_from_tensor"] = "no room"
            await update(engine, checkpoints[1], 1)
            assert engine.version == 1 and f"{second.url} left (" in caplog.text
            first.fatal["update_weights_from_tensor"] = first.calls["update_weights_from_tensor"] + 1
            with pytest.raises(ServerError, match="no server is left"):
                await update(engine, checkpoints[0], 2)
        finally:
            await engine.stop()

    asyncio.run(play())


def test_servers_read_files_in_a_directory_that_is_given(start: Start, toy_run: Any, tmp_path: Path) -> None:
    servers = [start(), start()]
    options = {"hf_checkpoint": servers[0].manager.checkpoint, "engine": "sglang", "device": "cpu"}
    options |= {"sglang_url": ",".join(server.url for server in servers), "sglang_weights_dir": tmp_path / "weights"}
    run = toy_run([], steps=2, verify_logprobs=True, **options)
    assert all(step["verify/abs_log_prob"] < 1e-4 for step in run.metrics)
    for server in servers:
        assert server.calls["update_weights_from_disk"] == 3 and not server.calls["update_weights_from_tensor"]


def test_adapters_travel_over_http_and_to_late_servers(start: Start, listed: Callable[..., str], toy_run: Any) -> None:
    pytest.importorskip("peft")
    room = {"enable_lora": True, "max_lora_rank": 8, "max_loaded_loras": 2, "max_loras_per_batch": 2}
    first, second, late = (start(**room, lora_target_modules=["all"]) for _ in range(3))
    url = listed(first, second)
    second.fatal["generate"] = 10
    changed = when(lambda: second.dead, lambda: listed(first, late))
    options = {"hf_checkpoint": first.manager.checkpoint, "engine": "sglang", "device": "cpu", "lr": 1e-2}
    options |= {"lora_sync": "adapter", "lora_target_modules": "q_proj,v_proj,o_proj", "sglang_url": url}
    run = toy_run(["lora"], steps=8, **options)
    assert not changed.is_alive() and all(step["mismatch/abs_log_prob"] < 1e-4 for step in run.metrics)
    assert first.calls["load_lora_adapter_from_tensors"] == 9 and late.calls["load_lora_adapter_from_tensors"] >= 1
    assert late.calls["generate"] > 1 and not first.manager.adapters and not late.manager.adapters
    assert run.metrics[-1]["sglang/servers"] == 2


def test_a_message_holds_the_tensors_and_a_checksum() -> None:
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(7), "c": torch.tensor(2.5)}
    bucket = Bucket()
    for name, tensor in tensors.items():
        bucket.add(name, tensor)
    body, payload = bucket.flatten().message(2)
    more = {"flush_cache": True, "weight_version": "5", "copies": False}
    message = json.loads(tensor_messages.encode("update_weights_from_tensor", {**body, **more}, payload, 2))
    assert set(message) == {"flush_cache", "weight_version", "serialized_named_tensors"}
    one, other = map(base64.b64decode, message["serialized_named_tensors"])
    assert one == other
    found = SafeUnpickler(io.BytesIO(one)).load()
    assert [name for name, _ in found] == list(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found)
    at = one.index(bytes(payload[:8]))
    for place in (at, at + 30, at + len(payload) - 61):
        damaged = bytearray(one)
        damaged[place] ^= 4
        with pytest.raises(AssertionError, match="the weights in this message differ from those sent"):
            SafeUnpickler(io.BytesIO(damaged)).load()
    words = torch.arange(6, dtype=torch.int64)
    swapped = words[[1, 0, 2, 3, 4, 5]]
    assert tensor_messages.checksum(bytearray(words.numpy())) != tensor_messages.checksum(bytearray(swapped.numpy()))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "the file with the servers' addresses cannot be read"),
        ("# nothing\n\n", "the file lists no server"),
        ("http://a:1\nhttp://b:1\nhttp://a:1/\n", "http://a:1 is listed twice"),
        ("http://a:1\nb:1\n", "'b:1' is not the address of a server"),
    ],
)
def test_a_bad_file_is_refused_in_the_plan(plan: Any, tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "servers.txt").write_text(content)
    for url in (f"@{tmp_path}/servers.txt", f"{tmp_path}/servers.txt"):
        with pytest.raises(PlanError, match=said):
            plan(engine="sglang", sglang_url=url)


def test_the_plan_says_how_weights_travel(plan: Any) -> None:
    with pytest.raises(PlanError, match="http://a:1 is listed twice"):
        plan(engine="sglang", sglang_url="http://a:1,http://a:1")
    url = "http://a:1,http://b:1"
    assert "over HTTP, in messages with checksums" in str(plan(engine="sglang", sglang_url=url).advice)
    assert "as files" in str(plan(engine="sglang", sglang_url=url, sglang_weights_dir="/shared").advice)


def test_a_list_that_turns_bad_changes_nothing(
    start: Start, listed: Callable[..., str], checkpoints: list[Path], caplog: Any, tmp_path: Path
) -> None:
    first = start()
    url = listed(first)

    async def play() -> None:
        engine = engine_for(checkpoints[0], url)
        await engine.start()
        try:
            await update(engine, checkpoints[0], 0)
            (tmp_path / "servers.txt").write_text("nonsense\n")
            await until(lambda: "'nonsense' is not the address of a server" in caplog.text)
            (tmp_path / "servers.txt").unlink()
            await until(lambda: "cannot be read" in caplog.text)
            assert "the run continues with the servers of the previous list" in caplog.text
            assert len((await engine.generate(Request([1], LONG))).tokens) == 60
        finally:
            await engine.stop()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("info", "model_info", "said"),
    [
        ({"version": "0.5.16"}, {}, "has SGLang 0.5.16, and {first} has 0.5.17; all servers of a run must be alike"),
        ({"dtype": "bfloat16"}, {}, "has dtype = bfloat16, and {first} has float32"),
        ({}, {"architectures": ["LlamaForCausalLM"]}, " serves LlamaForCausalLM, and --hf-checkpoint"),
        ({"model_path": "other"}, {}, "has vocab_size = 96, and --hf-checkpoint"),
        ({"speculative_draft_model_path": "small"}, {}, "drafts with small"),
    ],
)
def test_servers_that_differ_are_refused(
    start: Start, checkpoints: list[Path], info: Any, model_info: Any, said: str, tmp_path: Path
) -> None:
    first, second = start(), start()
    if "model_path" in info:
        info = {"model_path": str(tiny_checkpoint("qwen3_moe", tmp_path / "other", vocab_size=96))}
    second.info, second.model_info = info, model_info
    engine = engine_for(checkpoints[0], first.url, second.url)
    with pytest.raises(ServerError, match=f"--sglang-url {second.url}: the server.*{said.format(first=first.url)}"):
        asyncio.run(engine.start())
    assert not first.calls["generate"] and not first.calls["update_weights_from_tensor"]


def test_a_server_that_is_dead_at_the_start_is_named(start: Start, checkpoints: list[Path]) -> None:
    engine = engine_for(checkpoints[0], start().url, "http://127.0.0.1:9")
    with pytest.raises(
        ServerError, match=r"--sglang-url http://127.0.0.1:9: no SGLang server answers there .*start it"
    ):
        asyncio.run(engine.start())


def test_one_process_of_a_run_serves_the_pool(plan: Any) -> None:
    pytest.importorskip("miles_ray")
    with pytest.raises(PlanError, match=r"one engine(.|\n)*one process of the run distributes requests and weights"):
        plan(engine="sglang", sglang_url="http://a:1,http://b:1", runtime="ray", rollout_num_gpus=2)


WHOLE = "would each send all of their weights to the same servers"


@pytest.mark.parametrize(
    "judge",
    [{}, {"role": "frozen", "generates": True}, {"sglang": {"url": ["http://b:1"]}}],
)
def test_whole_weights_of_two_policies_on_the_same_servers_are_refused(plan: Any, judge: dict[str, Any]) -> None:
    given: dict[str, Any] = {"engine": "sglang", "sglang_url": "http://a:1,http://b:1"}
    with pytest.raises(PlanError, match=r"one policy per server(.|\n)*the policies solver and judge " + WHOLE):
        plan(policies={"solver": {}, "judge": judge}, **given)
    plan(policies={"solver": {}, "judge": {"sglang": {"url": ["http://c:1"]}}}, **given)
    plan(policies={"solver": {}, "teacher": {"role": "frozen"}}, **given)


def test_adapters_of_two_policies_on_the_same_servers_are_accepted(plan: Any) -> None:
    pytest.importorskip("miles_lora")
    given: dict[str, Any] = {"engine": "sglang", "sglang_url": "http://a:1", "policies": {"solver": {}, "judge": {}}}
    targets = {"plugins": ["lora"], "lora_target_modules": "all-linear"}
    with pytest.raises(PlanError, match=r"one policy per server(.|\n)*--lora-sync adapter"):
        plan(**targets, **given)
    plan(lora_sync="adapter", **targets, **given)


def test_a_policy_that_a_plugin_added_is_refused_on_the_same_servers() -> None:
    config = load(["--engine", "sglang", "--sglang-url", "http://a:1", "--hf-checkpoint", "x"])
    added = [Policy(name="policy"), Policy(name="past", role="frozen", generates=True)]
    run: Any = SimpleNamespace(policies=added, config_of=lambda policy: config)
    with pytest.raises(ConfigError, match=f"^--sglang-url http://a:1: the policies past and policy {WHOLE}"):
        build.make_engine(run, added[0])


def test_addresses_are_repeated_or_null(tmp_path: Path) -> None:
    """Also as a run directory of an earlier version holds the option."""
    (tmp_path / "none.yaml").write_text("sglang: {url: null}\n")
    for arguments, expected in (
        (["--sglang-url", "http://a:1", "--sglang-url", "http://b:1"], ("http://a:1", "http://b:1")),
        (["--sglang-url", "http://a:1,http://b:1"], ("http://a:1", "http://b:1")),
        (["--config", str(tmp_path / "none.yaml")], None),
    ):
        assert load(["--engine", "sglang", *arguments]).plugin("sglang").url == expected
