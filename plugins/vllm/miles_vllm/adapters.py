"""Weight updates that consist of a LoRA adapter only (``miles_workers.servers.served_adapter``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from miles_vllm.config import RANKS
from miles_workers.servers import ServedAdapter


def adapter_arguments(options: Sequence[Any], checkpoint: str | Path) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter per policy. The next version of one is loaded before the previous one is unloaded.

    Args:
        options: the options of each policy's adapter (``rank``, ``target_modules``).
        checkpoint: the base, whose linear layers are ``all-linear``.
    """
    highest, room = max(each.rank for each in options), len(options) + 1
    targets = {name.rpartition(".")[2] for each in options for name in each.target_modules}
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in RANKS if rank >= highest),
        "max_loras": room,
        "max_cpu_loras": room,
        # without this list vLLM also wraps the output layer, and then fails to compute log-probs of prompts on a CPU
        "lora_target_modules": sorted(_linear_layers(checkpoint) if "all-linear" in targets else targets),
    }


def _linear_layers(checkpoint: str | Path) -> set[str]:
    """Return the names of the decoder's linear layers without their path."""
    found = set()
    for file in Path(checkpoint).glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            for path in (name.split(".") for name in stored.keys() if name.endswith(".weight")):  # noqa: SIM118
                if "layers" in path and len(stored.get_slice(".".join(path)).get_shape()) == 2:
                    found.add(path[-2])
    return found


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
