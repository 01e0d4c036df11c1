"""Weight updates that consist of a LoRA adapter only (``miles_workers.servers.served_adapter``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from miles_workers.servers import ServedAdapter

#: Maximum ranks for which vLLM has room.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def adapter_arguments(options: Sequence[Any]) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter per policy. The next version of one is loaded before the previous one is unloaded.

    Args:
        options: the options of each policy's adapter (``rank``).
    """
    highest = max(each.rank for each in options)
    room = len(options) + 1
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in RANKS if rank >= highest),
        "max_loras": room,
        "max_cpu_loras": room,
    }


class VllmAdapter(ServedAdapter):
    """The adapter that vLLM applies to the requests of one engine.

    Args:
        call: calls a method of vLLM's ``Link``.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        super().__init__()
        self._call = call

    async def add(self, name: str, message: Mapping[str, Any], version: int) -> None:
        await self._call("load_adapter", name, message["config"], message["tensors"])

    async def remove(self, name: str) -> None:
        await self._call("unload_adapter", name)
