"""The engine contract on a double of SGLang: what the adapter makes of SGLang's habits, in seconds and without SGLang."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from sglang_double import DoubleLink, stand_in_for_sglang

import miles_sglang
from miles_core.data import WeightUnit
from miles_core.engine import Request, Sampling
from miles_core.plugin import MilesError, WorkerLost
from miles_formats import Codec, FormatCodec
from miles_fp8.format import Fp8
from miles_sglang import build
from miles_sglang.build import assemble
from miles_sglang.choices import Choices
from miles_sglang.engine import SglangEngine
from miles_sglang.link import SglangLost
from miles_testing import EngineContract, Limits, tiny_checkpoint, tiny_tokenizer
from miles_testing.engine_contract import stored_units
from miles_testing.stored import buckets


@pytest.fixture(autouse=True, scope="module")
def sglang() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_sglang(patch)
        yield


def engine_for(
    checkpoint: Path,
    limits: Limits = Limits(),  # noqa: B008
    codec: Codec | None = None,
    codec_of: Callable[[str], Codec] | None = None,
    **arguments: Any,
) -> SglangEngine:
    tokenizer = tiny_tokenizer()
    engine = assemble(
        checkpoint,
        codec or Codec(),
        lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
        checkpoint.parent / "work",
        Choices(
            arguments=arguments,
            device="cpu",
            bucket_bytes=20_000,
            max_context=limits.max_context,
            max_running_requests=limits.max_running_requests,
        ),
        codec_of=codec_of,
    )
    engine.link = DoubleLink(checkpoint, engine.link.arguments)  # type: ignore[attr-defined]
    return engine


class TestEngine(EngineContract):
    pause_modes = ("retract",)
    extra = "rollout_routed_experts"

    async def make(self, checkpoint: Path, limits: Limits) -> SglangEngine:
        return engine_for(checkpoint, limits, enable_return_routed_experts=True, enable_deterministic_inference=True)


class Lossy(TestEngine):
    __test__ = False

    async def make(self, checkpoint: Path, limits: Limits) -> SglangEngine:
        engine = await super().make(checkpoint, limits)
        engine.link.drop = "layers.1.self_attn.q_proj"  # type: ignore[attr-defined]
        return engine


def test_an_update_that_loses_a_bucket_fails_the_contract(tmp_path: Path) -> None:
    checkpoints = [tiny_checkpoint("qwen3_moe", tmp_path / str(seed), seed) for seed in range(3)]
    suite = Lossy()
    with asyncio.Runner() as runner, pytest.raises(AssertionError):
        engine = runner.run(suite.start_engine(checkpoints[0]))
        suite.test_two_updates_equal_a_fresh_load(engine, runner, checkpoints)


def test_a_format_whose_layout_sglang_changes_is_loaded_by_a_new_start(tmp_path: Path) -> None:
    from miles_mxfp8.format import Mxfp8

    checkpoint = tiny_checkpoint(
        "qwen3", tmp_path / "model", hidden_size=128, intermediate_size=128, head_dim=32, num_key_value_heads=4
    )
    codec = FormatCodec(Mxfp8())
    engine = engine_for(checkpoint, codec=codec)
    found: dict[str, Any] = {}

    async def restart(changes: Mapping[str, Any]) -> Mapping[str, Any]:
        directory = Path(changes["model_path"])
        found.update(changes, files={f.name for f in directory.iterdir()})
        found["config"] = json.loads((directory / "config.json").read_text())["quantization_config"]
        found["tensors"] = set(load_file(directory / "model-00001.safetensors"))
        return {}

    engine.link.restart = restart  # type: ignore[method-assign]
    units = [WeightUnit({e.name: e.parts[e.name]}) for e in stored_units(checkpoint)]
    assert engine.hot_update("mxfp8") == "restart" and engine.hot_update("int4") == engine.hot_update("") == "in_place"
    assert engine.link.arguments["watchdog_timeout"] > 1000  # type: ignore[attr-defined]
    asyncio.run(engine.update_weights(codec.encode(units), 4))
    assert found["weight_version"] == "4" and found["load_format"] == "auto" and engine.version == 4
    assert found["config"]["quant_method"] == "mxfp8" and "tokenizer.json" in found["files"]
    assert "model.layers.0.self_attn.q_proj.weight_scale_inv" in found["tensors"]
    assert not any((tmp_path / "work" / "weights").iterdir())


def test_another_precision_restarts_sglang_with_the_format_s_configuration(tmp_path: Path) -> None:
    """The form of a warm-up: it serves BF16, then FP8, and generates again when it has the codes."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 4}
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "model", **sizes)
    codec = FormatCodec(Fp8())
    engine = engine_for(checkpoint, codec_of={"fp8": codec}.__getitem__, watchdog_timeout=50.0)
    starts: list[Mapping[str, Any]] = []
    sent: list[str] = []

    async def restart(changes: Mapping[str, Any]) -> Mapping[str, Any]:
        starts.append(changes)
        return {}

    async def receive(endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        sent.append(json.dumps(body))
        return {"success": True, "message": ""}

    async def changed() -> None:
        await engine.start()
        engine.link.restart = restart  # type: ignore[method-assign]
        await engine.update_weights(stored_units(checkpoint), 1)
        assert engine.settings.served.codec.format is None and "rebuild" in engine.capabilities
        await engine.rebuild("fp8")
        with pytest.raises(MilesError, match="weights are incomplete"):
            await engine.generate(Request([3, 4], Sampling(2)))
        engine.link.call = receive  # type: ignore[method-assign]
        units = [WeightUnit({e.name: e.parts[e.name]}) for e in stored_units(checkpoint)]
        await engine.update_weights(codec.encode(units), 2)
        assert engine.version == 2

    asyncio.run(changed())
    config = json.loads((Path(starts[0]["model_path"]) / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 128] and starts[0]["load_format"] == "dummy"
    assert "watchdog_timeout" not in starts[0]  # the user's
    assert len(starts) == 1 and any("layers.0.self_attn.q_proj.weight_scale_inv" in body for body in sent)


@pytest.fixture
def double(monkeypatch: Any) -> types.SimpleNamespace:
    """What a run starts instead of SGLang: ``link``, which dies over ``fatal`` calls."""
    monkeypatch.setattr(miles_sglang, "plugin", replace(miles_sglang.plugin, packages=()))
    made = types.SimpleNamespace(link=None, fatal={})

    def make(arguments: Mapping[str, Any], *_: Any, **__: Any) -> DoubleLink:
        made.link = DoubleLink(Path(arguments["model_path"]), arguments)
        made.link.fatal = made.fatal
        return made.link

    monkeypatch.setattr(build, "ProcessLink", make)
    return made


def test_buckets_that_are_wrong_or_end_with_sglang_are_sent_again_then_the_plain_way(
    monkeypatch: Any, toy_run: Any, caplog: Any, double: types.SimpleNamespace
) -> None:
    double.fatal[1, "update_weights_from_tensor"] = 2
    kinds, receive = set[str](), SglangEngine.receive

    async def spoiled(self: SglangEngine, message: Any, version: int, last: bool) -> None:
        kinds.add(message["memory"]["kind"])
        wrong = message["units"] and version == 2  # whenever it comes
        await receive(self, {**message, "checksum": 0} if wrong else message, version, last)

    monkeypatch.setattr(SglangEngine, "receive", spoiled)
    run = toy_run(["tis"], use_zero_copy_sync=True, max_restarts=1, engine="sglang", device="cpu", steps=3)
    assert kinds == {"file"} and double.link.starts == 2 and run.engine.version == 3
    assert all(step["mismatch/abs_log_prob"] < 1e-4 for step in run.metrics)

    assert "version 1 are pushed again: SGLang died while it loaded version 1" in caplog.text
    assert "version 2 are pushed again: the bucket of weights that starts with" in caplog.text
    assert "weights travel by the plain copy from version 2 on" in caplog.text


def test_a_staged_version_is_kept_beside_sglang_until_it_is_put_in_force(tmp_path: Path) -> None:
    checkpoints = [tiny_checkpoint("qwen3", tmp_path / str(seed), seed) for seed in range(2)]
    engine = engine_for(checkpoints[0])

    async def staged() -> list[int]:
        await engine.start()
        for number, message in enumerate(buckets(checkpoints[1])):
            await engine.receive({**message, "staged": True}, 1, number == 1)
        calls = [engine.link.calls["update_weights_from_tensor"]]  # type: ignore[attr-defined]
        assert engine.version == -1 and (await engine.generate(Request([5], Sampling(1)))).tokens
        await engine.receive({"switch": True}, 1, True)
        return [*calls, engine.link.calls["update_weights_from_tensor"]]  # type: ignore[attr-defined]

    before, after = asyncio.run(staged())
    assert before == 0 < after and engine.version == 1


def test_a_colocated_run_with_routing_replay_survives_three_deaths(
    toy_run: Any, caplog: Any, double: types.SimpleNamespace
) -> None:
    """Its log-probs are the trainer's after each: what replaces SGLang has the current weights."""
    double.fatal |= {(1, "generate"): 3, (2, "update_weights_from_tensor"): 2, (3, "pause_generation"): 1}
    options = {"engine": "sglang", "device": "cpu", "colocate": True}
    run = toy_run(["r3", "tis"], sglang_enable_deterministic_inference=True, **options)
    assert all(step["mismatch/abs_log_prob"] < 1e-4 for step in run.metrics if step["step"])
    assert run.metrics[-1]["r3/tokens_differing"] == 0
    assert double.link.starts == 4
    assert caplog.text.count("worker sglang was lost: SGLang's process ended (signal SIGKILL)") == 3


@pytest.mark.parametrize(("routes", "exact"), [("newest", True), ("sampled", False)])
def test_a_continued_response_replays_the_routes_of_the_weights_that_continued_it(
    toy_run: Any, double: types.SimpleNamespace, routes: str, exact: bool
) -> None:
    options = {"engine": "sglang", "device": "cpu", "partial_rollout": True, "over_sampling_batch_size": 4}
    lengths = {"rollout_max_response_len": 32, "max_running_requests": 6}
    run = toy_run(["r3"], steps=6, r3_recomputed_routes=routes, lr=5e-2, **options, **lengths)
    name = "mismatch/current_abs_log_prob_max"  # a step may consist of samples that were left from the one before
    gaps = [step[name] for step in run.metrics if name in step]
    assert len(gaps) > 1 and all(gap < 1e-4 for gap in gaps) == exact
    assert any(len({version for _, version in s["weight_versions"]}) > 1 for s in run.samples)


class Gone(DoubleLink):
    async def start(self) -> Mapping[str, Any]:
        return {}

    async def _send_request(self, endpoint: str, *_: Any) -> Any:
        raise SglangLost("it ended", ("its last words",))


def test_an_engine_that_may_not_be_started_again_says_who_was_lost(tmp_path: Path) -> None:
    engine = engine_for(tiny_checkpoint("qwen3", tmp_path / "model", 0))
    engine.link = Gone(tmp_path, {})

    async def asked() -> None:
        await engine.start()
        await engine.generate(Request([5], Sampling(1)))

    async def resend() -> None:
        raise AssertionError("it may not be started again")

    with pytest.raises(WorkerLost, match=r"^a worker was lost: it ended; its last lines:\n  its last words"):
        asyncio.run(asked())  # where somebody else replaces the engine, who knows its name
    engine.resend = resend
    with pytest.raises(WorkerLost, match="worker sglang was lost: it ended, and no worker may be replaced"):
        asyncio.run(asked())
