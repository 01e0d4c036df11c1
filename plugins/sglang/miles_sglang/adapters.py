"""Weight updates that consist of a LoRA adapter only (``miles_workers.servers.served_adapter``), through SGLang's API for loading adapters.

The adapter travels as a directory in peft's format, which SGLang's process must be able to read, or over HTTP (``tensor_messages``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.plugin import MilesError
from miles_sglang.adapter_layout import ALL_EXPERTS, EXPERT_PARAMETERS, convert
from miles_sglang.answers import Answer
from miles_workers.servers import ServedAdapter


def adapter_arguments(options: Sequence[Any], experts: bool = False) -> dict[str, Any]:
    """Return SGLang's arguments for one adapter per policy. The next version of one is loaded before the previous one is unloaded.

    Args:
        options: the options of each policy's adapter (``rank``, ``target_modules``).
        experts: whether one of them adapts joined experts.
    """
    targets = {name.rpartition(".")[2] for each in options for name in each.target_modules}
    if experts:  # SGLang adapts a layer of experts only if both are targets
        targets = {*targets, *EXPERT_PARAMETERS} - {ALL_EXPERTS}
    return {
        "enable_lora": True,
        "max_lora_rank": max(each.rank for each in options),
        "lora_target_modules": ["all"] if "all-linear" in targets else sorted(targets),
        "max_loaded_loras": len(options) + 1,
        "max_loras_per_batch": len(options) + 1,
    }


class SglangAdapter(ServedAdapter):
    """The adapter that SGLang applies to the requests of one engine.

    Args:
        call: calls an endpoint of SGLang.
        directory: where adapters are written for SGLang; None if they are sent over HTTP.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]], directory: Path | None) -> None:
        super().__init__()
        self._call, self._directory = call, directory

    def select(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request with the adapter's name, if there is an adapter."""
        return {**body, "lora_path": self.name} if self.name else {**body}

    def label(self, answer: Answer) -> Answer:
        """Return the answer with the adapter's version: SGLang reports that of the base."""
        if self.version < 0:
            return answer
        columns = dict(answer.columns)
        if "versions" in columns:
            columns["versions"] = np.full_like(columns["versions"], self.version)
        return replace(answer, meta={**answer.meta, "weight_version": str(self.version)}, columns=columns)

    async def add(self, name: str, message: Mapping[str, Any], version: int) -> None:
        message = _converted(message)
        if self._directory is None:
            body = {"lora_name": name, "config_dict": message["config"]}
            answer = await self._call("load_lora_adapter_from_tensors", body, message["tensors"])
        else:
            answer = await self._add_file(message, name, self._directory / name)
        if not answer["success"]:
            raise MilesError(
                f"SGLang rejected the adapter of version {version}: {answer.get('error_message') or 'no reason given'}"
            )

    async def remove(self, name: str) -> None:
        await self._call("unload_lora_adapter", {"lora_name": name})

    async def _add_file(self, message: Mapping[str, Any], name: str, path: Path) -> Any:
        path.mkdir(parents=True)
        try:
            (path / "adapter_config.json").write_text(json.dumps(message["config"]), encoding="utf-8")
            (path / "adapter_model.safetensors").write_bytes(message["tensors"])
            return await self._call("load_lora_adapter", {"lora_name": name, "lora_path": str(path.absolute())})
        finally:
            shutil.rmtree(path)


def _converted(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the adapter as SGLang loads it."""
    config, tensors = convert(message["config"], message["tensors"])
    return {**message, "config": config, "tensors": tensors}
