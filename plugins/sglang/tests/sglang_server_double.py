"""A double of SGLang's HTTP server: the tokenizer manager of ``sglang_double`` behind the endpoints that the plugin calls.

As SGLang 0.5.17 does, it unpickles tensors with calls of a few modules only, and dies when a message cannot be unpickled.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from sglang_double import Body, Manager

from miles_testing.doubles import server

#: Modules of SGLang's ``SafeUnpickler`` that occur here, with everything below them.
_ALLOWED = ("builtins.", "collections.", "functools.", "torch.")


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not (module + ".").startswith(_ALLOWED) or (module, name) in {("builtins", "eval"), ("builtins", "exec")}:
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class ServerManager(Manager):
    """As in a server, which has none of the plugin's code."""

    def __init__(self, checkpoint: Path, arguments: dict[str, Any]) -> None:
        self.ignores = ""  # part of a tensor's name: updates do not reach such tensors, without a word
        self.updates: list[int] = []  # bytes of each update's messages
        super().__init__(checkpoint, arguments)

    async def update_weights_from_tensor(self, body: Any, _: Any) -> tuple[bool, str]:
        assert body.load_format is None and len(body.serialized_named_tensors) == 1
        data = base64.b64decode(body.serialized_named_tensors[0])
        for name, tensor in SafeUnpickler(io.BytesIO(data)).load():
            if not self.ignores or self.ignores not in name:
                self.tensors[name].copy_(tensor)
        self.updates.append(len(data))
        return self._updated(body)

    async def load_lora_adapter_from_tensors(self, body: Any, _: Any) -> Any:
        tensors = SafeUnpickler(io.BytesIO(base64.b64decode(body.serialized_named_tensors[0]))).load()
        path = Path(tempfile.mkdtemp(dir=self.checkpoint.parent))
        (path / "adapter_config.json").write_text(json.dumps(body.config_dict))
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
        return await self.load_lora_adapter(Body(lora_name=body.lora_name, lora_path=str(path)), None)


class ServerDouble(server.ServerDouble):
    """A server at a free port of this machine.

    Attributes:
        info, model_info: what differs from the usual answers of these endpoints.
        refuses: endpoint -> reason with which calls are refused.
    """

    def __init__(self, checkpoint: Path, **arguments: Any) -> None:
        super().__init__()
        self.info: dict[str, Any] = {}
        self.model_info: dict[str, Any] = {}
        self.refuses: dict[str, str] = {}
        given = {"context_length": 136, "max_running_requests": 16, "weight_version": "-1", "custom_weight_loader": []}

        async def make() -> ServerManager:
            return ServerManager(checkpoint, {**given, **arguments})

        self.manager = self.wait(make())
        config = json.loads((checkpoint / "config.json").read_text())
        self.described = {"model_type": config["model_type"], "architectures": config["architectures"]}
        self.arguments = {
            "tp_size": 1,
            "version": "0.5.17",
            "model_path": str(checkpoint),
            "dtype": "float32",
            **arguments,
        }
        self.listen()

    def respond(self, route: str, body: dict[str, Any], headers: Any) -> tuple[int, Any]:
        found = self._respond(route, body)
        return 400 if isinstance(found, dict) and found.get("success") is False else 200, found

    def _respond(self, endpoint: str, body: dict[str, Any]) -> Any:
        if endpoint in self.refuses:
            return {"success": False, "message": self.refuses[endpoint]}
        if endpoint == "server_info":
            return {**self.arguments, **self.info}
        if endpoint == "model_info":
            return {**self.described, "weight_version": self.manager.version, **self.model_info}
        return self.wait(self._call(endpoint, Body(**body)))

    async def _call(self, endpoint: str, body: Any) -> Any:
        manager = self.manager
        if endpoint == "generate":
            async for answer in manager.generate_request(body, None):
                return answer
        if endpoint == "abort_request":
            return manager.abort_request(body.rid)
        if endpoint in ("pause_generation", "continue_generation"):
            return await getattr(manager, endpoint)(body)
        if endpoint == "flush_cache":
            return "Cache flushed."
        found = await getattr(manager, endpoint)(body, None)
        if isinstance(found, tuple):
            return {"success": found[0], "message": found[1]}
        return {"success": found.success, "error_message": found.error_message}
