"""Weight updates that consist of a LoRA adapter only (transport ``adapter``), through SGLang's API for loading adapters.

SGLang is started with the base model from the checkpoint, and several policies may share it (``shared``). Each version of an adapter is
loaded under a name of its own, requests name it, and the previous version is unloaded; SGLang caches prefixes per adapter, so no prefix of
an earlier version is used. The adapter travels as a directory in peft's format, which SGLang's process must be able to read, or over HTTP
(``tensor_messages``).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.plugin import MilesError
from miles_sglang.adapter_layout import ALL_EXPERTS, EXPERT_PARAMETERS, convert
from miles_sglang.answers import Answer
from miles_sglang.link import SglangError

#: Key of a message of the transport: name of the adapter. The other keys are ``config`` (peft's configuration; None for a policy that
#: computes with the base alone) and ``tensors`` (a safetensors file as bytes).
ADAPTER = "adapter"
#: How long the end of a run waits for a server to unload an adapter.
_LEAVE_SECONDS = 30.0


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


class ServedAdapter:
    """The adapter that SGLang applies to the requests of one engine.

    Args:
        call: calls an endpoint of SGLang.
        directory: where adapters are written for SGLang; None if they are sent over HTTP.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]], directory: Path | None) -> None:
        self._call, self._directory = call, directory
        self._name, self._version = "", -1
        self._numbers, self._owner = itertools.count(), secrets.token_hex(4)  # other runs may use the same server

    def forget(self) -> None:
        """SGLang was restarted, and has no adapter."""
        self._name, self._version = "", -1

    async def leave(self) -> None:
        """Unload the adapter from a server that outlives this engine."""
        name, self._name = self._name, ""
        if name:
            with suppress(SglangError, TimeoutError):  # the server has ended, or does not answer
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await self._call("unload_lora_adapter", {"lora_name": name})

    def select(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request with the adapter's name, if there is an adapter."""
        return {**body, "lora_path": self._name} if self._name else {**body}

    def label(self, answer: Answer) -> Answer:
        """Return the answer with the adapter's version: SGLang reports that of the base."""
        if self._version < 0:
            return answer
        columns = dict(answer.columns)
        if "versions" in columns:
            columns["versions"] = np.full_like(columns["versions"], self._version)
        return replace(answer, meta={**answer.meta, "weight_version": str(self._version)}, columns=columns)

    async def load(self, message: Mapping[str, Any], version: int) -> None:
        """Load the adapter of a message, if it has one, and unload the previous one.

        Raises:
            MilesError: SGLang rejected it; the previous adapter remains.
        """
        name = "" if message["config"] is None else await self._add(_converted(message), version)
        previous, self._name, self._version = self._name, name, version
        if previous:
            await self._call("unload_lora_adapter", {"lora_name": previous})

    async def _add(self, message: Mapping[str, Any], version: int) -> str:
        """Load an adapter under a new name, and return the name."""
        name = f"{message[ADAPTER]}-{version}-{self._owner}-{next(self._numbers)}"
        if self._directory is None:
            body = {"lora_name": name, "config_dict": message["config"]}
            answer = await self._call("load_lora_adapter_from_tensors", body, message["tensors"])
        else:
            answer = await self._add_file(message, name, self._directory / name)
        if not answer["success"]:
            raise MilesError(
                f"SGLang rejected the adapter of version {version}: {answer.get('error_message') or 'no reason given'}"
            )
        return name

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
