"""Running servers as one engine (``--vllm-url``), on doubles of vLLM's HTTP server."""

from __future__ import annotations

import asyncio
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
from vllm_double import stand_in_for_vllm
from vllm_server_double import ServerDouble

import miles_vllm
from miles_core.config.load import load
from miles_core.engine import Request, Sampling
from miles_core.plugin import ConfigError, MilesError, MismatchError, PlanError, Policy, SyncError
from miles_formats import Codec
from miles_testing import EngineContract, Limits, tiny_checkpoint, tiny_tokenizer
from miles_testing.doubles.server import starting, write_list
from miles_testing.engine_contract import stored_units
from miles_vllm.build import Choices, assemble, make_engine
from miles_vllm.engine import VllmEngine
from miles_workers.servers import ServerError, pool

Start = Callable[..., ServerDouble]
LONG = Sampling(60, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def double() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_vllm(patch)
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("servers")
    return [tiny_checkpoint("qwen3", root / str(seed), seed) for seed in range(2)]


@pytest.fixture
def start(checkpoints: list[Path], monkeypatch: Any) -> Iterator[Start]:
    """Starts a server with the first checkpoint."""
    monkeypatch.setattr(miles_vllm, "plugin", replace(miles_vllm.plugin, packages=()))
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.02)
    with starting(partial(ServerDouble, checkpoints[0])) as start:
        yield start


@pytest.fixture
def listed(tmp_path: Path) -> Callable[..., str]:
    """Writes the file with the addresses of servers."""
    return partial(write_list, tmp_path)


def engine_for(checkpoint: Path, *url: str, **choices: Any) -> VllmEngine:
    given = {"device": "cpu", "startup_timeout": 0.1, "bucket_bytes": 1 << 16, **choices}
    tokenizer = tiny_tokenizer()

    def detokenize(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return assemble(checkpoint, Codec(), detokenize, checkpoint.parent / "work", Choices(url=url, **given))


def used(engine: VllmEngine, play: Callable[[VllmEngine], Any]) -> None:
    """Start an engine, use it and stop it."""

    async def main() -> None:
        await engine.start()
        try:
            await play(engine)
        finally:
            await engine.stop()

    asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def update(engine: VllmEngine, checkpoint: Path, version: int) -> None:
    await engine.pause("abort")
    await engine.update_weights(stored_units(checkpoint), version)
    await engine.resume()


def when(condition: Callable[[], Any], act: Callable[[], Any]) -> threading.Thread:
    """Call ``act`` in a thread once ``condition`` holds."""

    def run() -> None:
        while not condition():
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


class TestServers(EngineContract):
    """Two servers behind the engine contract."""

    family = "qwen3"
    pause_modes = ()
    hottest = 2.0
    atol = 1e-3

    @pytest.fixture(scope="class")
    def checkpoints(self, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        root = tmp_path_factory.mktemp("contract")
        return [tiny_checkpoint(self.family, root / str(seed), seed) for seed in range(3)]

    async def make(self, checkpoint: Path, limits: Limits) -> VllmEngine:
        given = {
            "max_model_len": limits.max_context + 1,
            "max_num_seqs": limits.max_running_requests,
            "seed": limits.seed,
        }
        server = await asyncio.to_thread(lambda: ServerDouble(checkpoint, **given))
        return engine_for(checkpoint, server.url, max_context=limits.max_context)


def test_a_run_survives_a_death_and_uses_a_server_that_joins_late(
    start: Start, listed: Callable[..., str], toy_run: Any, caplog: Any
) -> None:
    caplog.set_level("INFO")
    first, second, late = start(), start(), start()
    url = listed(first, second)
    second.fatal["inference/v1/generate"] = (
        20  # in the first rollout: before it, the checks of the first sync call both servers
    )
    changed = when(lambda: second.dead, lambda: listed(first, late))
    options = {"hf_checkpoint": first.checkpoint, "engine": "vllm", "device": "cpu", "vllm_url": url}
    run = toy_run([], steps=7, verify_logprobs=True, **options)
    assert not changed.is_alive()
    assert all(max(step["verify/abs_log_prob"], step["mismatch/abs_log_prob"]) < 1e-4 for step in run.metrics)
    total = {n: sum(step[f"vllm/{n}"] for step in run.metrics) for n in ("joined", "left", "retried_requests")}
    assert (total["joined"], total["left"]) == (1, 1) and total["retried_requests"] >= 1
    assert run.metrics[-1]["vllm/servers"] == 2 and late.calls["inference/v1/generate"] > 2
    assert late.version == first.version == 7
    assert f"{second.url} left (" in caplog.text and f"{late.url} joined with version" in caplog.text


def test_every_server_has_the_weights_and_answers_requests(start: Start, checkpoints: list[Path]) -> None:
    servers = [start(), start()]

    async def play(engine: VllmEngine) -> None:
        await update(engine, checkpoints[1], 4)
        for server in servers:
            sent = {unit.name: unit.parts[unit.name] for unit in stored_units(checkpoints[1])}
            has = dict(server.llm.worker.model.inner.named_parameters())
            assert all(torch.equal(has[name], tensor) for name, tensor in sent.items() if name in has)
        scores = await engine.score_each([[1, 2, 3, 4], [5]])
        assert list(scores) == [server.url for server in servers]
        assert len({tuple(found.tolist()) for found, _ in scores.values()}) == 1
        assert all(len(alone) == 0 for _, alone in scores.values())
        answers = await asyncio.gather(*(engine.generate(Request([1, 2, 3], LONG, key=i)) for i in range(6)))
        assert {tuple(answer.weight_versions) for answer in answers} == {((0, 4),)}
        assert all(len(answer.log_probs) == 60 for answer in answers)
        assert [server.calls["inference/v1/generate"] for server in servers] == [6, 6]  # 3, a check, and 2 scores

    used(engine_for(checkpoints[0], *(server.url for server in servers)), play)


def test_weights_can_travel_as_files(start: Start, checkpoints: list[Path], tmp_path: Path) -> None:
    servers = [start(), start()]

    async def play(engine: VllmEngine) -> None:
        await update(engine, checkpoints[1], 1)
        assert [server.version for server in servers] == [1, 1] and not list(tmp_path.iterdir())

    used(engine_for(checkpoints[0], *(server.url for server in servers), weights_dir=tmp_path), play)


def test_a_directory_that_a_server_cannot_read_is_named(
    start: Start, checkpoints: list[Path], tmp_path: Path, monkeypatch: Any
) -> None:
    async def play(engine: VllmEngine) -> None:
        monkeypatch.setattr(Path, "read_bytes", lambda path: Path("/nonexistent/file").read_text())
        with pytest.raises(SyncError, match=r"workers cannot read .*; --vllm-weights-dir must be a directory"):
            await update(engine, checkpoints[1], 1)

    used(engine_for(checkpoints[0], start().url, weights_dir=tmp_path), play)


def test_damaged_weights_are_refused_and_sent_again(start: Start, checkpoints: list[Path]) -> None:
    server = start()

    async def play(engine: VllmEngine) -> None:
        server.damages = True
        with pytest.raises(SyncError, match=f"--vllm-url {server.url}: .*checksum"):
            await update(engine, checkpoints[1], 1)
        with pytest.raises(MilesError, match="weights are incomplete"):
            await engine.resume()
            await engine.generate(Request([1], LONG))
        server.damages = False
        await update(engine, checkpoints[1], 1)
        assert server.version == 1 and len((await engine.generate(Request([1], LONG))).tokens) == 60

    used(engine_for(checkpoints[0], server.url), play)


def test_a_server_that_does_not_load_all_weights_does_not_join(
    start: Start, listed: Callable[..., str], checkpoints: list[Path], caplog: Any
) -> None:
    caplog.set_level("INFO")
    first, late, wrong = start(), start(), start()
    wrong.ignores = "down_proj"
    url = listed(first)

    async def play(engine: VllmEngine) -> None:
        await update(engine, checkpoints[0], 0)
        listed(first, late, wrong)
        await until(lambda: caplog.text.count("answers; it joins with the next weights") == 2)
        await update(engine, checkpoints[1], 1)
        assert f"{late.url} joined with version 1 of the weights; 2 servers" in caplog.text
        assert f"{wrong.url}: its log-probs differ from those of {first.url}" in caplog.text

    used(engine_for(checkpoints[0], url, allow_mismatch=True), play)


def test_a_server_whose_parameters_are_not_reached_ends_the_run(start: Start, checkpoints: list[Path]) -> None:
    good, wrong = start(), start()
    wrong.ignores = "down_proj"

    async def play(engine: VllmEngine) -> None:
        with pytest.raises(MismatchError, match=r"did not reach .*down_proj"):
            await update(engine, checkpoints[1], 1)

    used(engine_for(checkpoints[0], good.url, wrong.url), play)


def test_requests_of_a_server_that_leaves_are_answered_by_others(
    start: Start, listed: Callable[..., str], checkpoints: list[Path]
) -> None:
    first, second = start(), start()
    url = listed(first, second)

    async def play(engine: VllmEngine) -> None:
        await update(engine, checkpoints[0], 0)
        asked = [asyncio.ensure_future(engine.generate(Request([1, 2, 3], LONG, key=i))) for i in range(6)]
        await until(lambda: second.calls["inference/v1/generate"] >= 4)
        listed(first)
        answers = await asyncio.gather(*asked)
        assert all(len(answer.tokens) == 60 and answer.finish == "length" for answer in answers)
        assert engine.link.news is not None and engine.link.news.left == 1 and engine.link.news.retried >= 1
        await until(lambda: second.calls["abort_requests"] == engine.link.news.retried)

    used(engine_for(checkpoints[0], url), play)


def test_a_server_that_another_run_updates_has_left(start: Start, checkpoints: list[Path], caplog: Any) -> None:
    first, second = start(), start()

    async def play(engine: VllmEngine) -> None:
        await update(engine, checkpoints[0], 3)
        second.llm.worker.miles_updates.version = 8
        await until(lambda: engine.link.news.left)  # type: ignore[union-attr]
        assert f"{second.url} left (it has weights of version 8 instead of 3)" in caplog.text

    used(engine_for(checkpoints[0], first.url, second.url), play)


COMMAND = (
    "start it with VLLM_SERVER_DEV_MODE=1 vllm serve .* --enable-scale-out --logprobs-mode processed_logprobs "
    "--worker-extension-cls miles_vllm.receiver.WeightReceiver"
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"key": "secret"},
            r"refuses the key of this run \(401\): put its key into the environment variable VLLM_API_KEY",
        ),
        ({"development": False}, f"the server has no route collective_rpc: {COMMAND}"),
        ({"extended": False}, f"the server's workers cannot receive weights from this plugin: {COMMAND}"),
        ({"scale_out": False}, rf"does not answer requests with token ids \(403\): {COMMAND}"),
        (
            {"info": {"logprobs_mode": "raw_logprobs"}},
            f"logprobs_mode = raw_logprobs, and .*sampled distribution; {COMMAND}",
        ),
        ({"info": {"quantization": "fp8"}}, "quantization = fp8, and this engine needs None: weights arrive in BF16"),
        ({"info": {"data_parallel_size": 2}}, "data_parallel_size = 2, and this engine needs 1: each copy"),
        ({"info": {"max_model_len": 64}}, r"--max-model-len 64, and .* is 100; start it with --max-model-len 101"),
        ({"info": {"architectures": ["LlamaForCausalLM"]}}, "serves LlamaForCausalLM, and --hf-checkpoint"),
    ],
)
def test_a_server_that_cannot_serve_the_run_is_named(
    start: Start, checkpoints: list[Path], change: dict[str, Any], said: str
) -> None:
    server = start()
    vars(server).update(change)
    with pytest.raises(ServerError, match=f"^--vllm-url {server.url}: .*{said}"):
        asyncio.run(engine_for(checkpoints[0], server.url, max_context=100).start())
    assert not server.calls["pause"]


def test_the_key_is_sent(start: Start, checkpoints: list[Path], monkeypatch: Any) -> None:
    server = start()
    server.key = "secret"
    monkeypatch.setenv("VLLM_API_KEY", "secret")

    async def play(engine: VllmEngine) -> None:
        assert len((await engine.generate(Request([1], LONG))).tokens) == 60

    used(engine_for(checkpoints[0], server.url), play)


def test_a_key_with_a_line_break_is_refused_at_once(start: Start, checkpoints: list[Path], monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "one\ntwo")
    with pytest.raises(ConfigError, match="the environment variable VLLM_API_KEY: the value has characters"):
        asyncio.run(engine_for(checkpoints[0], start().url).start())


def test_a_server_that_a_run_left_paused_continues(start: Start, checkpoints: list[Path], caplog: Any) -> None:
    server = start()
    server.llm.vllm_paused = True

    async def play(engine: VllmEngine) -> None:
        assert "the server was paused" in caplog.text
        assert len((await engine.generate(Request([1], LONG))).tokens) == 60

    used(engine_for(checkpoints[0], server.url), play)


def test_dead_and_other_servers_are_named(start: Start, checkpoints: list[Path], monkeypatch: Any) -> None:
    with pytest.raises(ServerError, match=r"--vllm-url http://127.0.0.1:9: no vLLM server answers there .*start it"):
        asyncio.run(engine_for(checkpoints[0], start().url, "http://127.0.0.1:9").start())
    monkeypatch.setattr(ServerDouble, "respond", lambda *_: (404, {"detail": "Not Found"}))
    with pytest.raises(
        ServerError, match=r"version answered 404, so another program .*; give the address of a vLLM server"
    ):
        asyncio.run(engine_for(checkpoints[0], start().url).start())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vllm_url": "http://a:1,http://a:1"}, "http://a:1 is listed twice"),
        (
            {"vllm_url": "http://a:1", "vllm_args": '{"max_num_batched_tokens": 8192}'},
            "give the servers of --vllm-url the option",
        ),
        ({"vllm_url": "http://a:1", "vllm_enforce_eager": True}, "give the servers of --vllm-url the option"),
        ({"vllm_url": "http://a:1", "colocate": True}, "not .*--vllm-url|sleep mode"),
        ({"vllm_url": "http://a:1", "kv_cache_dtype": "float8_e4m3fn"}, "give them --kv-cache-dtype"),
        ({"vllm_weights_dir": "/shared"}, "only running servers receive weights as files"),
    ],
)
def test_the_plan_refuses_what_has_no_effect(plan: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(engine="vllm", **options)


def test_the_plan_says_how_weights_travel(plan: Any) -> None:
    assert "over HTTP, in messages with checksums" in str(plan(engine="vllm", vllm_url="http://a:1").advice)
    assert "as files" in str(plan(engine="vllm", vllm_url="http://a:1", vllm_weights_dir="/shared").advice)


def test_a_policy_that_a_plugin_added_is_refused_on_the_same_servers() -> None:
    config = load(["--engine", "vllm", "--vllm-url", "http://a:1", "--hf-checkpoint", "x"])
    added = [Policy(name="policy"), Policy(name="past", role="frozen", generates=True)]
    run: Any = SimpleNamespace(policies=added, config_of=lambda policy: config)
    with pytest.raises(ConfigError, match=r"^--vllm-url http://a:1: the policies past and policy would each send all"):
        make_engine(run, added[0])
