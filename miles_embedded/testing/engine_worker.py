"""Process of a ``ProcessEngine``: reads frames from standard input, writes frames to standard output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from safetensors.numpy import save as save_arrays
from safetensors.torch import load as load_tensors
from transformers import AutoTokenizer

from miles_core.data.weight_unit import Encoded
from miles_embedded.engine.build import end_tokens
from miles_embedded.engine.detokenizer import Detokenizer
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model
from miles_embedded.model.parts import configuration
from miles_embedded.testing import frames
from miles_embedded.testing.routes import record_routes


class Worker:
    """Executes calls on one embedded engine."""

    def __init__(self, engine: EmbeddedEngine, out: int) -> None:
        self.engine, self.out = engine, out
        self.units: list[Encoded] = []

    async def answer(self, message: dict[str, Any], payload: bytes) -> None:
        """Run one call and send its result or its error."""
        try:
            result, body = await self.run(message["method"], message["arguments"], payload)
            frame = frames.pack({"id": message["id"], "result": result}, body)
        except Exception as error:  # errors are raised in the calling process
            frame = frames.pack({"id": message["id"], "error": [type(error).__name__, str(error)]})
        view = memoryview(frame)
        while view:
            view = view[os.write(self.out, view) :]

    async def run(self, method: str, arguments: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Run one call of the engine; returns its result and binary payload."""
        if method == "generate":
            return frames.pack_response(await self.engine.generate(frames.unpack_request(arguments)))
        if method == "score":
            rows = await self.engine.score(arguments["sequences"], arguments["temperature"])
            return {}, save_arrays({str(i): row for i, row in enumerate(rows)})
        if method == "unit":
            self.units.append(Encoded(arguments["name"], load_tensors(payload), arguments["format"]))
            return {}, b""
        if method == "update_weights":
            units, self.units = self.units, []
            await self.engine.update_weights(units, arguments["version"])
            return {}, b""
        if method == "receive":
            if payload:
                arguments["message"]["memory"]["data"] = payload
            await self.engine.receive(**arguments)
            return {}, b""
        if method == "start":
            await self.engine.start()
            return dict(self.engine.model_facts()), b""
        if method in ("stop", "pause", "abort", "resume", "sleep", "wake"):
            await getattr(self.engine, method)(**arguments)
            return {}, b""
        raise ValueError(f"unknown method {method!r}")


async def main(config: dict[str, Any], out: int) -> None:
    """Process calls until standard input ends."""
    model = load_model(config.pop("checkpoint"), device=config.pop("device"))
    record_routes(model)
    tokenizer = AutoTokenizer.from_pretrained(configuration(model).name_or_path)
    settings = Settings(Detokenizer(tokenizer), end_tokens(model, tokenizer), **config)
    worker = Worker(EmbeddedEngine(model, settings), out)
    stream, loop, calls = asyncio.StreamReader(), asyncio.get_running_loop(), set()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
    while (frame := await frames.read(stream)) is not None:
        task = loop.create_task(worker.answer(*frame))
        calls.add(task)
        task.add_done_callback(calls.discard)


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)  # keep output of libraries out of the stream of frames
    asyncio.run(main(json.loads(sys.argv[1]), answers))
