"""A double of SGLang: the embedded engine behind the coroutines of SGLang's tokenizer manager.

Its habits are those of SGLang 0.5.17, against which ``test_contract.py`` runs the same suite: what SGLang does without a word is done
without a word here, so an adapter that forgets to look fails.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import types
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from miles_core.data import Encoded, Media
from miles_core.engine import Engine, Request, Sampling
from miles_embedded import load_model
from miles_embedded.engine.build import end_tokens
from miles_embedded.engine.detokenizer import Detokenizer
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.testing.routes import ROUTES, record_routes
from miles_sglang import inside, loader
from miles_sglang.answers import Answer
from miles_sglang.images import PackedBody
from miles_sglang.link import Link, SglangError, SglangLost
from miles_sglang.retraction import VERSIONS
from miles_sglang.worker import Worker


class Body(types.SimpleNamespace):
    """Stands for every request class of SGLang: what it was made with is what it holds."""

    def __getattr__(self, name: str) -> Any:
        return None


def stand_in_for_sglang(monkeypatch: Any) -> None:
    """What ``worker`` and ``buckets`` import from SGLang, in ``sys.modules``."""

    def module(name: str, **names: Any) -> None:
        made = types.ModuleType(name)
        made.__getattr__ = lambda attribute: names.get(attribute, Body)  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, made)

    class Serializer:
        serialize = staticmethod(lambda content: content)

    for parent in ("sglang", "sglang.srt", "sglang.srt.managers"):
        module(parent, __version__="0.5.17")
    module("sglang.srt.managers.io_struct")
    module("sglang.srt.utils", MultiprocessingSerializer=Serializer)


class ReceivedImages:
    """The images of requests, as SGLang receives them: in place of the model's processor."""

    def __init__(self, model: Any) -> None:
        self.model, self.merge = model, model.config.vision_config.spatial_merge_size
        self.received: dict[Media, dict[str, torch.Tensor]] = {}
        self.places: dict[tuple[Media, ...], list[np.ndarray]] = {}

    def receive(self, tokens: list[int], image_data: list[dict[str, Any]]) -> tuple[Media, ...]:
        """Split the one entry of a request into its images, as SGLang's processor of the Qwen-VL models does, and check its positions."""
        (entry,) = image_data
        assert entry["format"] == "processor_output"
        grids, ids = entry["image_grid_thw"], torch.tensor([tokens])
        features = [range(start, end + 1) for start, end in entry["offsets"]]
        assert [len(f) for f in features] == (grids.prod(1) // self.merge**2).tolist()
        kinds = torch.zeros_like(ids)
        for f in features:
            assert {tokens[i] for i in f} == {self.model.config.image_token_id}
            kinds[0, f.start : f.stop] = 1
        positions, delta = self.model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
        assert torch.equal(entry["mrope_positions"], positions[:, 0]) and torch.equal(
            entry["mrope_position_delta"], delta
        )
        found = []
        for grid, pixels in zip(grids, entry["pixel_values"].split(grids.prod(1).tolist()), strict=True):
            found.append(Media.of("image", pixels.numpy().tobytes()))
            self.received[found[-1]] = {"pixel_values": pixels, "image_grid_thw": grid[None]}
        self.places[tuple(found)] = [np.array(f) for f in features]
        return tuple(found)

    def inputs(self, media: Media) -> dict[str, torch.Tensor]:
        return self.received[media]

    def find_places(self, tokens: np.ndarray, placeholder: int, media: tuple[Media, ...]) -> list[np.ndarray]:
        return self.places[media] if media else []


class Manager:
    """A tokenizer manager. Requests of SGLang's context, which is a little longer than the run's, are lowered silently."""

    def __init__(self, checkpoint: Path, arguments: Mapping[str, Any]) -> None:
        model = self.computing(checkpoint)
        record_routes(model)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.context = int(arguments["context_length"])
        running = int(arguments["max_running_requests"])
        self.end, self.detokenize = end_tokens(model, tokenizer), Detokenizer(tokenizer)
        self.images = ReceivedImages(model) if hasattr(model.model, "visual") else None
        settings: dict[str, Any] = {
            "max_running_requests": running,
            "max_context": self.context,
            "processor": self.images,
        }
        self.settings = Settings(self.detokenize, self.end, seed=7, **settings)
        self.checkpoint = checkpoint
        self.engine: Engine = EmbeddedEngine(model, self.settings)
        self.tensors = load_file(checkpoint / "model.safetensors")
        self.version, self.loaders = str(arguments["weight_version"]), arguments["custom_weight_loader"]
        self.layers = model.config.get_text_config().num_hidden_layers
        self.rids: dict[str, int] = {}
        self.asked: list[int] = []  # tokens that each request for a response came with
        self.paused = False
        self.released: set[str] = set()
        self.adapters: dict[str, Engine] = {}  # name -> the base plus this adapter
        self.lora = arguments if arguments.get("enable_lora") else None
        self._load()

    def computing(self, checkpoint: Path) -> Any:
        """The model that the answers are computed with."""
        return load_model(str(checkpoint))

    @property
    def scheduled(self) -> Any:
        """What the schedulers hold and load updates into."""
        return self

    def _load(self) -> None:
        """SGLang copies what it is given and does not ask for the rest; the embedded engine is always given all."""
        whole = [Encoded(name, {name: tensor}) for name, tensor in self.tensors.items()]
        self.engine._usable = True  # type: ignore[attr-defined]
        asyncio.get_running_loop().create_task(self.engine.update_weights(whole, int(self.version))).add_done_callback(
            lambda t: t.result()
        )

    def auto_create_handle_loop(self) -> None:
        pass

    async def freeze_gc(self) -> None:
        pass

    async def generate_request(self, body: Any, _: Any) -> AsyncIterator[dict[str, Any]]:
        assert not self.released
        if body.lora_path and body.lora_path not in self.adapters:
            raise ValueError(f"Got LoRA adapter that has never been loaded: {body.lora_path}")
        engine = self.adapters[body.lora_path] if body.lora_path else self.engine
        parameters = body.sampling_params
        key = self.rids[body.rid] = int(parameters.get("sampling_seed", len(self.rids))) % (1 << 31)
        media = self.images.receive(body.input_ids, body.image_data) if self.images and body.image_data else ()
        if parameters["max_new_tokens"] == 0:
            (row,) = await engine.score([body.input_ids], 1.0, [media])
            entries = [
                (None, body.input_ids[0], None),
                *((float(x), t, None) for x, t in zip(row, body.input_ids[1:], strict=False)),
            ]
            yield self._answer(body, [], {"input_token_logprobs": entries}, {"type": "length", "length": 0})
            return
        self.asked.append(len(body.input_ids))
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
        found = await engine.generate(Request(body.input_ids, sampling, key=key, extras=extras, media=media))
        meta: dict[str, Any] = {
            "output_token_logprobs": [(p, t, None) for p, t in zip(found.log_probs, found.tokens, strict=False)]
        }
        if support in found.extras:
            meta["output_token_sampling_mask"] = [[int(t) for t in row] for row in found.extras[support]]
            meta["output_token_sampling_logprobs"] = found.log_probs
        ends = [index for index, _ in found.weight_versions[1:]] + [len(found.tokens)]
        meta[VERSIONS] = [
            v for (start, v), end in zip(found.weight_versions, ends, strict=False) for _ in range(start, end)
        ]
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
        loader.load(self.scheduled, body.serialized_named_tensors[0])  # type: ignore[arg-type]
        return self._updated(body)

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    def modules(self) -> Iterator[Any]:
        return iter(())

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)

    async def load_lora_adapter(self, body: Any, _: Any) -> Any:
        """An engine with the adapter's sum with the base answers the requests that name the adapter."""
        if self.lora is None or body.lora_name in self.adapters or len(self.adapters) >= self.lora["max_loaded_loras"]:
            return Body(success=False, error_message="LoRA is not enabled, or there are too many adapters")
        config = json.loads((Path(body.lora_path) / "adapter_config.json").read_text())
        if config["r"] > self.lora["max_lora_rank"]:
            return Body(success=False, error_message=f"rank {config['r']} is too large")
        found, tensors = load_file(Path(body.lora_path) / "adapter_model.safetensors"), dict(self.tensors)
        for name, down in found.items():
            if name.endswith("lora_A.weight"):
                layer = name.removeprefix("base_model.model.").removesuffix("lora_A.weight") + "weight"
                delta = found[name.replace("lora_A", "lora_B")] @ down * config["lora_alpha"] / config["r"]
                halves = [layer.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")]
                parts = delta.chunk(2) if halves[0] != layer else [delta]
                for one, part in zip(dict.fromkeys(halves), parts, strict=True):
                    tensors[one] = self.tensors[one] + part
        engine = EmbeddedEngine(load_model(str(self.checkpoint)), self.settings)
        await engine.update_weights([Encoded(name, {name: tensor}) for name, tensor in tensors.items()], 0)
        self.adapters[body.lora_name] = engine
        return Body(success=True)

    async def unload_lora_adapter(self, body: Any, _: Any) -> Any:
        del self.adapters[body.lora_name]
        return Body(success=True)

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
        await asyncio.gather(*(engine.pause(body.mode) for engine in (self.engine, *self.adapters.values())))

    async def continue_generation(self, body: Any) -> None:
        self.paused = False
        await asyncio.gather(*(engine.resume() for engine in (self.engine, *self.adapters.values())))

    def abort_request(self, rid: str) -> None:
        """Everything whose rid begins with this one."""
        keys = {key for one, key in self.rids.items() if one.startswith(rid)}
        for engine in (self.engine, *self.adapters.values()):
            asyncio.get_running_loop().create_task(engine.abort(keys))

    async def flush_cache(self) -> Any:
        assert "kv_cache" not in self.released
        return Body(success=True)

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
        self.starts = self.stops = 0
        self.fatal: dict[
            tuple[int, str], int
        ] = {}  # (number of the start, endpoint): the call of it that SGLang dies over

    async def start(self) -> Mapping[str, Any]:
        self.starts += 1
        self.calls: Counter[str] = Counter()
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.manager = self.managed()
        engine = types.SimpleNamespace(
            tokenizer_manager=self.manager, server_args=Body(tp_size=1), collective_rpc=self._rpc
        )
        self.worker = Worker(engine, None)  # type: ignore[arg-type]
        return {"tp_size": 1}

    def managed(self) -> Manager:
        """A manager that was just started."""
        return Manager(self.checkpoint, self.arguments)

    def _rpc(self, method: str) -> None:
        """As ``sglang.Engine.collective_rpc``: an error in the scheduler is an assertion that fails here."""
        assert method == "miles_coverage"
        runner = types.SimpleNamespace(model=self.manager.scheduled)
        try:
            inside.check_coverage(types.SimpleNamespace(tp_worker=types.SimpleNamespace(model_runner=runner)))
        except RuntimeError as error:
            raise AssertionError(str(error)) from error

    async def stop(self) -> None:
        self.stops += 1

    async def restart(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self.start()

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        packed = PackedBody.of(body)
        answer = await self._send_request("generate", packed.body, b"".join(packed.payload))
        message, columns = answer.message()
        return Answer.read(json.loads(json.dumps(message)), b"".join(columns))

    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        if endpoint == "update_weights_from_tensor" and self.drop and self.drop in json.dumps(body["tensors"]):
            return {"success": True, "message": "lost on its way"}
        return json.loads(json.dumps(await self._send_request(endpoint, body, payload)))

    async def _send_request(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
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
