"""The engine contract on a double of SGLang: what the adapter makes of SGLang's habits, in seconds and without SGLang.

The double is the embedded engine behind the coroutines of SGLang's tokenizer manager. Its habits are those of SGLang 0.5.17, against
which ``test_contract.py`` runs the same suite: what SGLang does without a word is done without a word here, so an adapter that
forgets to look fails.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import types
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import miles_sglang
from miles_core.backend import Encoded, Engine, Request, Sampling, Unit, WorkerLost
from miles_core.format import Codec
from miles_core.testing import EngineContract, Limits, tiny_checkpoint, tiny_tokenizer
from miles_core.testing.engine_contract import stored_units
from miles_core.testing.stored import buckets
from miles_embedded import load_model
from miles_embedded.engine.build import detokenizer, end_tokens
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.testing.routes import ROUTES, record_routes
from miles_sglang import build, loader
from miles_sglang.answers import Answer
from miles_sglang.build import Choices, assemble
from miles_sglang.engine import SglangEngine
from miles_sglang.link import Link, SglangError, SglangLost
from miles_sglang.worker import Worker


class _Body(types.SimpleNamespace):
    """Stands for every request class of SGLang: what it was made with is what it holds."""

    def __getattr__(self, name: str) -> Any:
        return None


def stand_in_for_sglang(monkeypatch: Any) -> None:
    """What ``worker`` and ``buckets`` import from SGLang, in ``sys.modules``."""

    def module(name: str, **names: Any) -> None:
        made = types.ModuleType(name)
        made.__getattr__ = lambda attribute: names.get(attribute, _Body)  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, made)

    class Serializer:
        serialize = staticmethod(lambda content: content)

    for parent in ("sglang", "sglang.srt", "sglang.srt.managers"):
        module(parent, __version__="0.5.17")
    module("sglang.srt.managers.io_struct")
    module("sglang.srt.utils", MultiprocessingSerializer=Serializer)


class Manager:
    """A tokenizer manager. Requests of SGLang's context, which is a little longer than the run's, are lowered silently."""

    def __init__(self, checkpoint: Path, arguments: Mapping[str, Any]) -> None:
        model = load_model(str(checkpoint))
        record_routes(model)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.context = int(arguments["context_length"])
        running = int(arguments["max_running_requests"])
        self.end, self.detokenize = end_tokens(model, tokenizer), detokenizer(tokenizer)
        self.engine: Engine = EmbeddedEngine(
            model,
            Settings(self.detokenize, self.end, seed=7, max_running_requests=running, max_context=self.context),
        )
        self.tensors = load_file(checkpoint / "model.safetensors")
        self.version, self.loaders = str(arguments["weight_version"]), arguments["custom_weight_loader"]
        self.layers = model.config.num_hidden_layers
        self.rids: dict[str, int] = {}
        self.paused = False
        self.released: set[str] = set()
        self._load()

    def _load(self) -> None:
        """SGLang copies what it is given and does not ask for the rest; the embedded engine is always given all."""
        whole = [Encoded(name, {name: tensor}) for name, tensor in self.tensors.items()]
        self.engine._usable = True  # type: ignore[attr-defined]
        asyncio.get_running_loop().create_task(self.engine.update_weights(whole, 0)).add_done_callback(
            lambda t: t.result()
        )

    def auto_create_handle_loop(self) -> None:
        pass

    async def freeze_gc(self) -> None:
        pass

    async def generate_request(self, body: Any, _: Any) -> AsyncIterator[dict[str, Any]]:
        assert not self.released
        parameters = body.sampling_params
        key = self.rids[body.rid] = int(parameters.get("sampling_seed", len(self.rids))) % (1 << 31)
        if parameters["max_new_tokens"] == 0:
            (row,) = await self.engine.score([body.input_ids])
            entries = [
                (None, body.input_ids[0], None),
                *((float(x), t, None) for x, t in zip(row, body.input_ids[1:], strict=False)),
            ]
            yield self._answer(body, [], {"input_token_logprobs": entries}, {"type": "length", "length": 0})
            return
        support = "sampling_support"
        if body.return_sampling_mask and parameters["top_k"] < 1:
            raise ValueError("return_sampling_mask requires finite top_k")
        ignoring = parameters["ignore_eos"]
        room = self.context - len(body.input_ids) - 2
        sampling = Sampling(
            min(parameters["max_new_tokens"], room),
            parameters["temperature"],
            parameters["top_p"],
            parameters["top_k"],
            tuple(parameters["stop"]),
            () if ignoring else tuple(parameters["stop_token_ids"]),
            ignoring,
        )
        extras = ({support} if body.return_sampling_mask else set()) | (
            {ROUTES} if body.return_routed_experts else set()
        )
        found = await self.engine.generate(Request(body.input_ids, sampling, key=key, extras=extras))
        meta: dict[str, Any] = {
            "output_token_logprobs": [(p, t, None) for p, t in zip(found.log_probs, found.tokens, strict=False)]
        }
        if support in found.extras:
            meta["output_token_sampling_mask"] = [[int(t) for t in row] for row in found.extras[support]]
            meta["output_token_sampling_logprobs"] = found.log_probs
        if ROUTES in found.extras:
            meta["routed_experts"] = self._routes(found.extras[ROUTES])
        reason: dict[str, Any] = {"type": found.finish}
        if found.finish == "stop":
            matched = next((s for s in sampling.stop if s in self.detokenize(found.tokens)), found.tokens[-1])
            reason["matched"] = matched
        del self.rids[body.rid]
        yield self._answer(body, found.tokens, meta, reason)

    def _answer(self, body: Any, tokens: list[int], meta: dict[str, Any], reason: dict[str, Any]) -> dict[str, Any]:
        meta |= {"finish_reason": reason, "weight_version": self.version, "prompt_tokens": len(body.input_ids)}
        return {"output_ids": tokens, "text": "", "meta_info": {**meta, "id": body.rid, "not": object()}}

    def _routes(self, rows: np.ndarray) -> str:
        """Every layer has rows, and so has a dense one."""
        record = np.zeros((len(rows), self.layers, rows.shape[-1]), np.int32)
        record[:, self.layers - rows.shape[1] :] = rows
        return base64.b64encode(record.tobytes()).decode()

    async def update_weights_from_tensor(self, body: Any, _: Any) -> tuple[bool, str]:
        assert body.load_format in self.loaders
        loader.load(self, body.serialized_named_tensors[0])  # type: ignore[arg-type]
        return self._updated(body)

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors.values())

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)

    async def update_weights_from_disk(self, body: Any, _: Any) -> tuple[bool, str, int]:
        for file in sorted(Path(body.model_path).glob("*.safetensors")):
            self.tensors |= load_file(file)
        return (*self._updated(body), 0)

    def _updated(self, body: Any) -> tuple[bool, str]:
        if body.weight_version is not None:
            assert body.flush_cache, "prefixes of the old weights would be used with the new ones"
            self.version = body.weight_version
            self._load()
        return True, "Success"

    async def pause_generation(self, body: Any) -> None:
        self.paused = True
        await self.engine.pause(body.mode)

    async def continue_generation(self, body: Any) -> None:
        self.paused = False
        await self.engine.resume()

    def abort_request(self, rid: str) -> None:
        """Everything whose rid begins with this one."""
        keys = {key for one, key in self.rids.items() if one.startswith(rid)}
        asyncio.get_running_loop().create_task(self.engine.abort(keys))  # type: ignore[arg-type]

    async def flush_cache(self) -> Any:
        assert "kv_cache" not in self.released
        return _Body(success=True)

    async def release_memory_occupation(self, body: Any, _: Any) -> None:
        assert not self.released & set(body.tags), "its memory was given back already"
        self.released |= set(body.tags)

    async def resume_memory_occupation(self, body: Any, _: Any) -> None:
        assert set(body.tags) <= self.released
        self.released -= set(body.tags)
        if "weights" in body.tags:
            self.tensors = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}


class DoubleLink(Link):
    """The worker's calls in this process, with JSON between; ``process`` and ``server`` have tests of their own."""

    same_host = True

    def __init__(self, checkpoint: Path, arguments: Mapping[str, Any]) -> None:
        self.checkpoint, self.arguments = checkpoint, arguments
        self.drop = ""  # part of a tensor's name: buckets with it are lost on their way, without a word
        self.starts = 0
        self.fatal: dict[
            tuple[int, str], int
        ] = {}  # (number of the start, endpoint): the call of it that SGLang dies over

    async def start(self) -> Mapping[str, Any]:
        self.starts += 1
        self.calls: Counter[str] = Counter()
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.manager = Manager(self.checkpoint, self.arguments)
        engine = types.SimpleNamespace(tokenizer_manager=self.manager, server_args=_Body(tp_size=1))
        self.worker = Worker(engine, None)  # type: ignore[arg-type]
        return {"tp_size": 1}

    async def stop(self) -> None:
        pass

    async def restart(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self.start()

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        answer = await self._asked("generate", body)
        message, columns = answer.message()
        return Answer.read(json.loads(json.dumps(message)), b"".join(columns))

    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        if endpoint == "update_weights_from_tensor" and self.drop and self.drop in json.dumps(body["tensors"]):
            return {"success": True, "message": "lost on its way"}
        return json.loads(json.dumps(await self._asked(endpoint, body, payload)))

    async def _asked(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        self.calls[endpoint] += 1
        if self.fatal.get((self.starts, endpoint)) == self.calls[endpoint]:
            self.death.set_result(None)
        asked = asyncio.ensure_future(self.worker.endpoints[endpoint](json.loads(json.dumps(body)), bytes(payload)))
        await asyncio.wait([asked, self.death], return_when=asyncio.FIRST_COMPLETED)
        if self.death.done():
            asked.cancel()
            raise SglangLost("SGLang's process ended (signal SIGKILL)", ("its last words",))
        try:
            return asked.result()
        except ValueError as error:
            raise SglangError(str(error)) from error


@pytest.fixture(autouse=True, scope="module")
def sglang() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_sglang(patch)
        yield


def engine_for(
    checkpoint: Path,
    limits: Limits = Limits(),  # noqa: B008
    codec: Codec | None = None,
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
    )
    engine.link = DoubleLink(checkpoint, engine.link.arguments)  # type: ignore[attr-defined]
    return engine


class TestEngine(EngineContract):
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
        engine = runner.run(suite._started(checkpoints[0]))
        suite.test_two_updates_equal_a_fresh_load(engine, runner, checkpoints)


def test_a_format_that_sglang_packs_is_loaded_by_a_new_start(tmp_path: Path) -> None:
    from miles_int4.format import Int4

    checkpoint = tiny_checkpoint(
        "qwen3", tmp_path / "model", hidden_size=128, intermediate_size=128, head_dim=32, num_key_value_heads=4
    )
    codec = Codec(Int4())
    engine = engine_for(checkpoint, codec=codec)
    found: dict[str, Any] = {}

    async def restart(changes: Mapping[str, Any]) -> Mapping[str, Any]:
        directory = Path(changes["model_path"])
        found.update(changes, files={f.name for f in directory.iterdir()})
        found["config"] = json.loads((directory / "config.json").read_text())["quantization_config"]
        found["tensors"] = set(load_file(directory / "model-00001.safetensors"))
        return {}

    engine.link.restart = restart  # type: ignore[method-assign]
    units = [Unit({e.name: e.parts[e.name]}) for e in stored_units(checkpoint)]
    assert engine.hot_update("int4") == "restart" and engine.hot_update("") == "in_place"
    assert engine.link.arguments["watchdog_timeout"] > 1000  # type: ignore[attr-defined]
    asyncio.run(engine.update_weights(codec.encode(units), 4))
    assert found["weight_version"] == "4" and found["load_format"] == "auto" and engine.version == 4
    assert found["config"]["quant_method"] == "compressed-tensors" and "tokenizer.json" in found["files"]
    assert "model.layers.0.self_attn.q_proj.weight_packed" in found["tensors"]
    assert not any((tmp_path / "work" / "weights").iterdir())


@pytest.fixture
def double(monkeypatch: Any) -> types.SimpleNamespace:
    """What a run starts instead of SGLang: ``link``, which dies over ``fatal`` calls."""
    rules = tuple(r for r in miles_sglang.plugin.requires if "pip install" not in r.because)
    monkeypatch.setattr(miles_sglang, "plugin", replace(miles_sglang.plugin, requires=rules))
    made = types.SimpleNamespace(link=None, fatal={})

    def make(arguments: Mapping[str, Any], *_: Any) -> DoubleLink:
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

    assert "version 1 are pushed again: SGLang died over version 1" in caplog.text
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


class Gone(DoubleLink):
    async def start(self) -> Mapping[str, Any]:
        return {}

    async def _asked(self, endpoint: str, *_: Any) -> Any:
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
    with pytest.raises(WorkerLost, match="worker sglang was lost: it ended, and none may be replaced"):
        asyncio.run(asked())
