"""The child process of ``process.ProcessLink``: serves an ``sglang.Engine`` through its tokenizer manager.

``sglang.Engine``'s own methods block its event loop and drop arguments; the tokenizer manager's methods are coroutines. The process is
started as ``python -m miles_sglang.worker FD PROBES_FD`` with two socket file descriptors: one for calls, one for ``answer_probes``.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from miles_sglang import frames, inside, model_modules, record_files
from miles_sglang.answers import Answer
from miles_sglang.images import unpack
from miles_sglang.request_batcher import RequestBatcher
from miles_sglang.standby import VARIABLE, Pool

#: Number of activations that share a scale in SGLang's FP8 layers.
_GROUP = 128


class Worker:
    """Serves calls on one engine.

    Args:
        engine: an ``sglang.Engine``, or a test double.
        writer: stream to the run.
    """

    def __init__(self, engine: Any, writer: asyncio.StreamWriter) -> None:
        self.engine, self.manager, self.writer = engine, engine.tokenizer_manager, writer
        self._covered = False  # whether the coverage of the first update was checked
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
            "load_lora_adapter": self.load_adapter,
            "unload_lora_adapter": self.unload_adapter,
        }

    def info(self) -> dict[str, Any]:
        """Return the startup information for the run, with the keys of the endpoint ``server_info``."""
        import sglang

        return {"version": sglang.__version__, "tp_size": self.engine.server_args.tp_size}

    async def answer(self, message: dict[str, Any], payload: bytes) -> None:
        """Run one call and send its result, or its error."""
        columns: list[memoryview] = []
        try:
            result: Any = await self.endpoints[message["endpoint"]](message["body"], payload)
            if isinstance(result, Answer):
                result, columns = result.message()
            said = {"result": result}
        except Exception as error:  # every error is sent to the caller in the run's process
            text = str(getattr(error, "detail", error)) or type(error).__name__
            said = {"error": f"SGLang refused {message['endpoint']}: {text}"}
        self.send({"id": message["id"], **said}, columns)
        await self.writer.drain()

    def send(self, message: dict[str, Any], payload: Sequence[memoryview] = ()) -> None:
        """Send one frame to the run."""
        self.writer.writelines([frames.head(message, sum(piece.nbytes for piece in payload)), *payload])

    async def generate(self, body: dict[str, Any], payload: bytes) -> Answer:
        from sglang.srt.managers.io_struct import GenerateReqInput

        result: dict[str, Any] = {}
        async for out in self.manager.generate_request(GenerateReqInput(**unpack(body, payload)), None):
            result = out
        refers = record_files.VARIABLE in os.environ  # the run reads the records
        return Answer.from_sglang(result, "uint8" if refers else os.environ.get(inside.VARIABLE, inside.WIDE))

    async def update_from_tensor(self, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        from miles_sglang import buckets, loader

        ranks = int(self.engine.server_args.tp_size)
        held, payloads = buckets.serialize_for_sglang(body, payload, ranks)
        success, message = await self.manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payloads,
                load_format=loader.NAME,
                flush_cache=body["flush_cache"],
                weight_version=body["weight_version"],
                disable_draft_model=body["disable_draft_model"],
            ),
            None,
        )
        del held  # SGLang has copied it
        missed = ""
        if success and body["weight_version"] is not None and not self._covered:
            self._covered, missed = True, await asyncio.to_thread(inside.ask_coverage, self.engine)
        return {"success": success, "message": message, "missed": missed}

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

    async def load_adapter(self, body: dict[str, Any], _: bytes) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        result = await self.manager.load_lora_adapter(LoadLoRAAdapterReqInput(**body), None)
        return {"success": result.success, "error_message": result.error_message}

    async def unload_adapter(self, body: dict[str, Any], _: bytes) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        result = await self.manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(**body), None)
        return {"success": result.success, "error_message": result.error_message}


async def serve(engine: Any, connection: socket.socket, kind: type[Worker] = Worker) -> None:
    """Serve calls concurrently until the run closes its end."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=frames.LIMIT)
    if not engine.server_args.enable_dp_attention:  # a batch would go to one data-parallel rank
        RequestBatcher(engine.tokenizer_manager)
    worker = kind(engine, writer)
    engine.tokenizer_manager.auto_create_handle_loop()
    # without this, garbage collection scans all imported objects for half a second while requests wait
    gc.collect()
    await engine.tokenizer_manager.freeze_gc()
    worker.send({"id": 0, "result": worker.info()})
    calls: set[asyncio.Task[None]] = set()
    while (frame := await frames.read(reader)) is not None:
        task = asyncio.get_running_loop().create_task(worker.answer(*frame))
        calls.add(task)
        task.add_done_callback(calls.discard)


async def follow(engine: Any, connection: socket.socket) -> None:
    """Hold this machine's part of an engine until the run closes its end or one of its schedulers ends."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=frames.LIMIT)
    writer.write(frames.head({"id": 0, "result": {"tp_size": engine.server_args.tp_size}}))
    schedulers = multiprocessing.active_children()
    closed = asyncio.ensure_future(frames.read(reader))
    while not closed.done() and all(process.is_alive() for process in schedulers):
        await asyncio.wait([closed], timeout=1.0)


def answer_probes(connection: socket.socket) -> None:
    """Quantise activations with SGLang's kernel until the run closes its end.

    Runs in a separate thread with a blocking socket, because the run calls it synchronously, outside its event loop.
    """
    while (frame := frames.receive(connection)) is not None:
        try:
            found, message = _quantize(frame[0]["format"], frame[0]["shape"], frame[1]), {}
        except Exception as error:  # every error is sent to the caller in the run's process
            found, message = b"", {"error": f"{type(error).__name__}: {error}"}
        connection.sendall(frames.head(message, len(found)) + found)


def _quantize(format: str, shape: list[int], numbers: bytes) -> bytes:
    import torch

    x = torch.frombuffer(bytearray(numbers), dtype=torch.float32).reshape(shape).cuda().bfloat16()
    if format == "mxfp8":  # the kernel of linear layers with --sglang-fp8-gemm-backend triton
        from sglang.srt.layers.quantization.fp8_utils import mxfp8_group_quantize

        codes, exponents = mxfp8_group_quantize(x)
        scales = torch.exp2(exponents.double() - 127)
    else:
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

        codes, scales = sglang_per_token_group_quant_fp8(x, _GROUP)
    values = codes.float().unflatten(-1, (scales.shape[-1], -1)) * scales.float()[..., None]
    return bytes(values.flatten(-2).cpu().numpy().tobytes())


def main(descriptor: int, probes: int, kind: type[Worker] = Worker) -> None:
    """Build the engine from the arguments in the run's first frame and serve it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the run
    connection = socket.socket(fileno=descriptor)
    pool = Pool(int(os.environ.get(VARIABLE, "0")))  # they import SGLang at the same time as this process
    import sglang

    # Importing sglang does not import its engine. This takes most of the time, in which the run may build its trainer.
    importlib.import_module("sglang.srt.entrypoints.engine")
    pool.install()
    first = frames.receive(connection)
    if first is None:
        sys.exit("the run ended before it sent SGLang's arguments")
    if directory := first[0].pop(record_files.VARIABLE, ""):
        os.environ[record_files.VARIABLE] = directory
    models = Path(sglang.__file__).with_name("srt") / "models"
    os.environ.update(model_modules.environment(first[0], models))
    try:
        engine = sglang.Engine(**first[0])
        pool.drop()
        follows = bool(first[0].get("node_rank"))  # only the first machine's part takes calls
        if not follows:
            inside.check(engine)
    except Exception as error:
        connection.sendall(frames.head({"id": 0, "error": f"SGLang did not start: {type(error).__name__}: {error}"}))
        raise
    threading.Thread(target=answer_probes, args=(socket.socket(fileno=probes),), daemon=True).start()
    try:
        if follows:
            asyncio.run(follow(engine, connection))
        else:
            engine.loop.run_until_complete(serve(engine, connection, kind))
    finally:
        engine.shutdown()
        os._exit(0)  # SGLang's threads would keep the process alive


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
