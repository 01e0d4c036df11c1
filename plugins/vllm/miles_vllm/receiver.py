"""Receives weights inside vLLM's workers: vLLM adds ``WeightReceiver`` to its worker class (``worker_extension_cls``).

The buckets are those of the transport ``buckets``. Their tensors are loaded with vLLM's reloading of whole layers
(``vllm.model_executor.model_loader.reload``), which also repeats what vLLM does to weights after it has loaded them, and copies the result
into the memory with which vLLM computes. An update must contain every tensor of the checkpoint (``NameCheck``), and the first one must
reach every parameter of vLLM's model (``Coverage``).
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.data import Encoded
from miles_core.plugin import MilesError, SyncError
from miles_workers.transport import Arrival, Arrivals, Coverage, NameCheck, WeightNames

#: Import path of ``WeightReceiver`` for vLLM.
NAME = "miles_vllm.receiver.WeightReceiver"
#: vLLM's room for adapters.
_ROOM: dict[str, Callable[[Any], Any]] = {
    "max_lora_rank": lambda config: config.max_lora_rank,
    "max_loras": lambda config: config.max_loras,
    "max_cpu_loras": lambda config: config.max_cpu_loras,
    "lora_target_modules": lambda config: config.target_modules,
}
#: Kinds of memory that several workers, or processes that vLLM started, cannot read: a process group has one member per message.
_REFUSED = ("broadcast", "units")


class WeightReceiver:
    """Methods that vLLM's workers have in addition; the run calls them with ``collective_rpc``."""

    def miles_expect(self, names: Sequence[str], tied: bool, layers: int | None) -> None:
        """Prepare for updates. See ``WeightNames`` for the arguments."""
        self.miles_updates = Updates(self, WeightNames("vLLM", names, tied, layers))

    def miles_describe(self) -> dict[str, Any]:
        """Return the options of this vLLM that matter to a run, and the version of its weights; empty before the first update."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        model, parallel, lora = config.model_config, config.parallel_config, config.lora_config
        updates = getattr(self, "miles_updates", None)
        return {
            "model_path": str(model.model),
            "architectures": list(model.hf_config.architectures or ()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "max_model_len": int(model.max_model_len),
            "data_parallel_size": int(parallel.data_parallel_size),
            "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
            "speculative": config.speculative_config is not None,
            "adapters": {}
            if lora is None
            else {"enable_lora": True, **{name: read(lora) for name, read in _ROOM.items()}},
            "weights": "" if updates is None or updates.version is None else str(updates.version),
        }

    def miles_write_adapter(self, name: str, config: Mapping[str, Any], tensors: str) -> str:
        """Write an adapter in peft's format, and return the directory. vLLM reads it again if it has dropped the adapter meanwhile.

        Args:
            name: name of the adapter.
            config: peft's configuration.
            tensors: a safetensors file in base64.
        """
        path = Path(tempfile.mkdtemp(prefix="miles-adapter-"))
        self.miles_adapters = {**getattr(self, "miles_adapters", {}), name: path}
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        (path / "adapter_model.safetensors").write_bytes(base64.b64decode(tensors))
        return str(path)

    def miles_remove_adapter(self, name: str) -> None:
        """Remove the directory of an adapter."""
        if path := getattr(self, "miles_adapters", {}).pop(name, None):
            shutil.rmtree(path, ignore_errors=True)

    def miles_receive(self, message: Mapping[str, Any], version: int, last: bool) -> dict[str, Any]:
        """Process one message, see ``Updates.receive``."""
        return self.miles_updates.receive(message, version, last)


class Updates:
    """The weight updates of one worker.

    Args:
        worker: vLLM's worker.
        names: checks the names of the tensors.
    """

    def __init__(self, worker: Any, names: WeightNames) -> None:
        self.worker, self.names = worker, names
        self.served, self.complete, self.loading, self.missed = False, False, False, list[str]()
        self.version: int | None = None
        self._coverage: Coverage | None = None
        self._arrivals = Arrivals(self._begin)
        self._runner = asyncio.Runner()

    def receive(self, message: Mapping[str, Any], version: int, last: bool) -> dict[str, Any]:
        """Process one message of an update.

        Returns:
            ``complete``: the message completed an update; ``loading``: the weights are incomplete; ``missed``: parameters that the first
            complete update did not reach; and, if the message was refused, ``error``, with ``corrupt`` for a SyncError. (vLLM would send
            exceptions as text and log them as defects.)
        """
        refusal: dict[str, Any] = {}
        self.complete = False
        try:
            if message.get("memory", {}).get("kind") in _REFUSED:
                raise SyncError("vLLM's workers receive weights through shared memory, or the memory of a GPU")
            self._runner.run(self._arrivals.receive(_read_message(message), version, last))
            self.version = version if self.complete else self.version
        except MilesError as error:
            refusal = {"error": str(error), "corrupt": isinstance(error, SyncError)}
        return {"complete": self.complete, "loading": self.loading, "missed": self.missed, **refusal}

    def _begin(self, version: int, staged: bool) -> Arrival:
        if not staged:
            self._abandon()
        return _Update(self, staged)

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self.worker.model_runner.get_model()
        return model

    @torch.no_grad()
    def load(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Load some tensors of an update. vLLM keeps them until the last one of their layer has arrived."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.worker.vllm_config), torch.device(self.worker.device):
            if not self.loading:
                if not self.served:
                    self._coverage = Coverage(self._model)
                initialize_layerwise_reload(self._model)
                self.loading = True
            self._model.load_weights(tensors)  # type: ignore[operator]

    def finish(self) -> None:
        """Serve an update whose tensors have all been loaded."""
        self._place()
        if self._coverage is not None:
            self.missed, self._coverage = self._coverage.finish(self._model), None
        self.served, self.complete, self.loading = True, True, False

    def _abandon(self) -> None:
        """Return to complete layers after an incomplete update; their values are undefined."""
        if self.loading:
            self._place()
            self._coverage, self.loading = None, False

    @torch.no_grad()
    def _place(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.worker.vllm_config), torch.device(self.worker.device):
            finalize_layerwise_reload(self._model, self.worker.model_config)


def _read_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its bytes, which over HTTP are text, or are in a file that the server can read (kind ``read``)."""
    where = message.get("memory", {})
    if where.get("kind") == "read":
        try:
            data = Path(where["path"]).read_bytes()
        except OSError as error:
            raise SyncError(
                f"vLLM's workers cannot read {where['path']} ({error.strerror}); --vllm-weights-dir must be a directory that all servers can "
                "read, or leave it out, and the weights travel over HTTP"
            ) from error
    elif isinstance(where.get("data"), str):
        data = base64.b64decode(where["data"])
    else:
        return message
    return {**message, "memory": {"kind": "data", "data": data}}


class _Update(Arrival):
    """One version. A staged one is kept, on the worker's device, until it is served."""

    def __init__(self, updates: Updates, staged: bool) -> None:
        self._updates, self._staged = updates, staged
        self._seen, self._kept = NameCheck(updates.names), list[tuple[str, Tensor]]()

    async def take(self, units: Iterator[Encoded]) -> None:
        # read to the end first: the checksum is verified there
        views = [(name, tensor) for unit in self._seen.check(units) for name, tensor in unit.parts.items()]
        device = self._updates.worker.device
        tensors = [(name, tensor.to(device, copy=True)) for name, tensor in views]  # the sender reuses its memory
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if self._staged:
            self._kept += tensors
        elif tensors:
            self._updates.load(tensors)

    async def finish(self) -> None:
        self._seen.finish()
        if self._kept:
            self._updates.load(self._kept)
            self._kept = []
        self._updates.finish()
