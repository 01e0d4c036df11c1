"""A double of SGLang's HTTP server: the tokenizer manager of ``sglang_double`` behind the endpoints that the plugin calls.

As SGLang 0.5.17 does, it unpickles tensors with calls of a few modules only, and dies when a message cannot be unpickled.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from sglang_double import Body, Manager

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


class ServerDouble:
    """A server at a free port of this machine.

    Attributes:
        info, model_info: what differs from the usual answers of these endpoints.
        fatal: endpoint -> number of the call that the server dies over.
        refuses: endpoint -> reason with which calls are refused.
        hangs: no call is answered.
        calls: endpoint -> number of calls.
    """

    def __init__(self, checkpoint: Path, **arguments: Any) -> None:
        self.info: dict[str, Any] = {}
        self.model_info: dict[str, Any] = {}
        self.fatal: dict[str, int] = {}
        self.refuses: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.hangs = threading.Event()
        self.released = threading.Event()
        self.dead = False
        self._pending: set[Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
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
        handler = type("Handler", (_Handler,), {"double": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine where the manager runs; raises CancelledError if the server dies meanwhile."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._pending.add(future)
        try:
            return future.result(60)
        finally:
            self._pending.discard(future)

    def kill(self) -> None:
        """Break all connections and refuse new ones."""
        if not self.dead:
            self.dead = True
            self.released.set()
            threading.Thread(target=self._server.shutdown).start()
            self._server.server_close()
            for future in list(self._pending):
                future.cancel()

    def answer(self, endpoint: str, body: dict[str, Any]) -> Any:
        self.calls[endpoint] += 1
        if self.hangs.is_set():
            self.released.wait(60)
        if self.fatal.get(endpoint) == self.calls[endpoint]:
            self.kill()
        if self.dead:
            raise CancelledError
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


def _plain(value: Any) -> Any:
    """Convert what JSON does not know: numpy's numbers, columns, and anything else to text."""
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if hasattr(value, "__len__") else str(value)


class _Handler(BaseHTTPRequestHandler):
    double: ServerDouble

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        try:
            found = self.double.answer(self.path.strip("/"), body)
        except CancelledError:
            self.double.kill()
        except Exception:  # as SGLang's scheduler, which ends over it
            traceback.print_exc()
            self.double.kill()
        if self.double.dead:
            self.close_connection = True
            return
        text = json.dumps(found, default=_plain).encode()
        self.send_response(400 if isinstance(found, dict) and found.get("success") is False else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass
