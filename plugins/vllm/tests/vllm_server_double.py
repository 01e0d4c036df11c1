"""A double of vLLM's HTTP server: the ``AsyncLLM`` of ``vllm_double`` behind the routes that the plugin calls.

The routes and their answers were read in the source of vLLM 0.26.0 and 0.32.0, and compared with a real server of 0.32.0 on a CPU.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_double import AsyncLLM, SamplingParams

from miles_testing.doubles import server
from miles_vllm.receiver import WeightReceiver

_DEVELOPMENT = ("collective_rpc", "is_paused", "pause", "resume", "abort_requests", "reset_prefix_cache")
_PREFIX = "generate-tokens-"


class ServerDouble(server.ServerDouble):
    """A server at a free port of this machine.

    Attributes:
        key: what requests need as a key; empty for a server without one.
        development: it has the routes of VLLM_SERVER_DEV_MODE=1.
        scale_out: it answers requests with token ids.
        extended: its workers have the plugin's extension.
        info: what differs from the usual description.
        ignores: part of a tensor's name: updates do not change such tensors, and nothing reports that.
        runtime_adapters: it has the routes of VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.
        adapters: name -> vLLM's ``LoRARequest``.
        damages: bytes of the next messages with weights change on their way.
    """

    def __init__(self, checkpoint: Path, **arguments: Any) -> None:
        super().__init__()
        self.key, self.development, self.scale_out, self.extended = "", True, True, True
        self.runtime_adapters = True
        self.adapters: dict[str, Any] = {}
        self._ids = itertools.count(1)
        self.info: dict[str, Any] = {}
        self.ignores, self.damages = "", False
        given = {"max_model_len": 128, "max_num_seqs": 16, "seed": 0, "logprobs_mode": "processed_logprobs"}

        async def make() -> AsyncLLM:
            return AsyncLLM({**given, "model": str(checkpoint), **arguments})

        self.checkpoint = checkpoint
        self.llm = self.wait(make())
        self._load = self.llm.worker.model.load_weights
        self.llm.worker.model.load_weights = lambda weights: self._load(
            (name, tensor) for name, tensor in weights if not self.ignores or self.ignores not in name
        )
        self.listen()

    @property
    def version(self) -> int | None:
        """Version of the weights."""
        updates = getattr(self.llm.worker, "miles_updates", None)
        return None if updates is None else updates.version

    def respond(self, route: str, body: dict[str, Any], headers: Any) -> tuple[int, Any]:
        if route.startswith(("v1/", "inference/")) and self.key and headers["Authorization"] != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if route == "version":
            return 200, {"version": "0.32.0"}
        if route == "inference/v1/generate":
            return self._generate(body)
        if route in ("v1/load_lora_adapter", "v1/unload_lora_adapter") and self.runtime_adapters:
            return self.wait(getattr(self, f"_{route.removeprefix('v1/')}")(body))
        if route not in _DEVELOPMENT or not self.development:
            return 404, {"detail": "Not Found"}
        return self.wait(getattr(self, f"_{route}")(body))

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.scale_out:
            return 403, {
                "error": {"message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out"}
            }
        if "token_ids" not in body or "sampling_params" not in body:
            return 400, {"error": {"message": "validation errors: Field required"}}
        if "model" in body and body["model"] not in self.adapters:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        return 200, self.wait(self._answer(body))

    async def _answer(self, body: dict[str, Any]) -> Any:
        sampling = SamplingParams(**body["sampling_params"])
        prompt = {"prompt_token_ids": body["token_ids"]}
        stream = self.llm.generate(
            prompt, sampling, _PREFIX + body["request_id"], self.adapters.get(body.get("model", ""))
        )
        (result,) = [each async for each in stream]
        made, scored = result.outputs[0], result.prompt_logprobs
        pairs = zip(made.token_ids, made.logprobs.logprobs, strict=True)
        content = [{"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []} for token, value in pairs]
        wants = body["sampling_params"].get("logprobs") is not None
        return {
            "request_id": _PREFIX + body["request_id"],
            "choices": [
                {
                    "index": 0,
                    "finish_reason": made.finish_reason,
                    "token_ids": made.token_ids,
                    "routed_experts": None,
                    "logprobs": {"content": content} if wants else None,
                }
            ],
            "usage": {"prompt_tokens_details": None},
            "prompt_logprobs": None
            if scored is None
            else [
                None,
                *({str(t): {"logprob": v}} for t, v in zip(body["token_ids"][1:], scored.logprobs, strict=True)),
            ],
        }

    async def _collective_rpc(self, body: dict[str, Any]) -> tuple[int, Any]:
        method, args = body["method"], body.get("args", [])
        if not self.extended or not hasattr(WeightReceiver, method):
            missing = f"'CPUWorker' object has no attribute '{method}'"
            return 500, {
                "error": {"message": f"Call to collective_rpc method failed: Worker failed with error ''{missing}'"}
            }
        if method == "miles_receive" and self.damages and "data" in args[0]["memory"]:
            args[0]["memory"]["data"] = "A" * 8 + args[0]["memory"]["data"][8:]
        (found,) = await self.llm.collective_rpc(method, tuple(args))
        return 200, {"results": [{**found, **self.info} if method == "miles_describe" else found]}

    async def _load_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "lora_name" not in body:
            return 400, {"error": {"message": "validation errors: Field required"}}
        name = body["lora_name"]
        request = SimpleNamespace(lora_name=name, lora_int_id=next(self._ids), lora_path=body["lora_path"])
        try:
            await self.llm.add_lora(request)
        except Exception as error:
            return 500, {"error": {"message": f"Call to add_lora method failed: {error}"}}
        self.adapters[name] = request
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    async def _unload_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        del self.adapters[body["lora_name"]]  # vLLM's workers keep it until there are too many
        return 200, "removed"

    async def _is_paused(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"is_paused": self.llm.vllm_paused}

    async def _pause(self, body: dict[str, Any]) -> tuple[int, Any]:
        await self.llm.pause_generation(mode="abort", clear_cache=True)
        return 200, {"status": "paused"}

    async def _resume(self, body: dict[str, Any]) -> tuple[int, Any]:
        await self.llm.resume_generation()
        return 200, {"status": "resumed"}

    async def _abort_requests(self, body: dict[str, Any]) -> tuple[int, Any]:
        for request_id in body["request_ids"]:
            await self.llm.abort(request_id)
        await asyncio.sleep(0)
        return 200, {"status": "aborted"}

    async def _reset_prefix_cache(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"success": await self.llm.reset_prefix_cache()}
