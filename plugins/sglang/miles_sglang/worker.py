"""The process behind ``process.ProcessLink``: an ``sglang.Engine``, asked through its tokenizer manager.

``sglang.Engine``'s own methods run its event loop until they are done and drop arguments; its tokenizer manager's are
coroutines of that loop. Started as ``python -m miles_sglang.worker FD``, with one end of a socket pair as file descriptor FD.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from miles_sglang import frames

#: What of a response's ``meta_info`` travels.
_META = (
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_version",
    "num_retractions",
    "output_token_logprobs",
    "input_token_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
    "routed_experts",
)


class Worker:
    """Answers calls on one engine.

    Args:
        engine: an ``sglang.Engine``, or a double of it.
        writer: to the run.
    """

    def __init__(self, engine: Any, writer: asyncio.StreamWriter) -> None:
        self.engine, self.manager, self.writer = engine, engine.tokenizer_manager, writer
        self.endpoints: dict[str, Callable[[dict[str, Any], bytes], Awaitable[Any]]] = {
            "generate": self.generate,
            "update_weights_from_tensor": self.update_from_tensor,
            "update_weights_from_disk": self.update_from_disk,
            "pause_generation": self.pause,
            "continue_generation": self.resume,
            "abort_request": self.abort,
            "flush_cache": self.flush,
            "release_memory_occupation": self.release,
            "resume_memory_occupation": self.regain,
            "weights_checker": self.checksum,
        }

    def info(self) -> dict[str, Any]:
        """What the run wants to know once SGLang is up; the names are those of the endpoint ``server_info``."""
        import sglang

        arguments = self.engine.server_args
        names = ("tp_size", "context_length", "enable_memory_saver", "speculative_algorithm")
        names += ("enable_deterministic_inference", "enable_return_routed_experts", "attention_backend")
        return {"version": sglang.__version__, **{name: getattr(arguments, name, None) for name in names}}

    async def answer(self, message: dict[str, Any], payload: bytes) -> None:
        """Run one call and send its result, or its error."""
        try:
            result = {"result": await self.endpoints[message["endpoint"]](message["body"], payload)}
        except Exception as error:  # every error belongs to the caller, on the other side
            text = str(getattr(error, "detail", error)) or type(error).__name__
            result = {"error": f"SGLang refused {message['endpoint']}: {text}"}
        self.send({"id": message["id"], **result})
        await self.writer.drain()

    def send(self, message: dict[str, Any]) -> None:
        """One frame to the run."""
        self.writer.write(frames.head(message))

    async def generate(self, body: dict[str, Any], _: bytes) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        result: dict[str, Any] = {}
        async for out in self.manager.generate_request(GenerateReqInput(**body), None):
            result = out
        meta = {name: result["meta_info"][name] for name in _META if name in result["meta_info"]}
        return {"output_ids": result["output_ids"], "meta_info": meta}

    async def update_from_tensor(self, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        from miles_sglang import buckets

        ranks = int(self.engine.server_args.tp_size)
        held, payloads = buckets.for_sglang(body, payload, ranks)
        success, message = await self.manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payloads,
                load_format="flattened_bucket",
                flush_cache=body["flush_cache"],
                weight_version=body["weight_version"],
            ),
            None,
        )
        del held  # SGLang has copied it
        return {"success": success, "message": message}

    async def update_from_disk(self, body: dict[str, Any], _: bytes) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        success, message, *_rest = await self.manager.update_weights_from_disk(
            UpdateWeightFromDiskReqInput(**body), None
        )
        return {"success": success, "message": message}

    async def pause(self, body: dict[str, Any], _: bytes) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self.manager.pause_generation(PauseGenerationReqInput(**body))

    async def resume(self, body: dict[str, Any], _: bytes) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self.manager.continue_generation(ContinueGenerationReqInput(**body))

    async def abort(self, body: dict[str, Any], _: bytes) -> None:
        self.manager.abort_request(**body)

    async def flush(self, body: dict[str, Any], _: bytes) -> dict[str, Any]:
        return {"success": bool((await self.manager.flush_cache()).success)}

    async def release(self, body: dict[str, Any], _: bytes) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(**body), None)

    async def regain(self, body: dict[str, Any], _: bytes) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(**body), None)

    async def checksum(self, body: dict[str, Any], _: bytes) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        success, message, _ranks, whole = await self.manager.check_weights(CheckWeightsReqInput(**body), None)
        return {"success": success, "message": message, "checksum": whole}


async def serve(engine: Any, connection: socket.socket) -> None:
    """Answer until the run closes its end; calls run side by side."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=frames.LIMIT)
    worker = Worker(engine, writer)
    engine.tokenizer_manager.auto_create_handle_loop()
    worker.send({"id": 0, "result": worker.info()})
    calls: set[asyncio.Task[None]] = set()
    while (frame := await frames.read(reader)) is not None:
        task = asyncio.get_running_loop().create_task(worker.answer(*frame))
        calls.add(task)
        task.add_done_callback(calls.discard)


def main(descriptor: int) -> None:
    """Build the engine that the run's first frame describes, and serve it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the run
    connection = socket.socket(fileno=descriptor)
    arguments = _first(connection)
    import sglang

    try:
        engine = sglang.Engine(**arguments)
    except Exception as error:
        connection.sendall(frames.head({"id": 0, "error": f"SGLang did not start: {type(error).__name__}: {error}"}))
        raise
    try:
        engine.loop.run_until_complete(serve(engine, connection))
    finally:
        engine.shutdown()
        os._exit(0)  # SGLang's threads would keep the process


def _first(connection: socket.socket) -> dict[str, Any]:
    """The run's first frame, read before there is an event loop: SGLang makes its own."""

    def exactly(count: int) -> bytes:
        found = b""
        while len(found) < count:
            piece = connection.recv(count - len(found))
            if not piece:
                sys.exit("the run ended before it said what to start")
            found += piece
        return found

    text, _ = frames.sizes(exactly(frames.HEAD_SIZE))
    message: dict[str, Any] = json.loads(exactly(text))
    return message


if __name__ == "__main__":
    main(int(sys.argv[1]))
