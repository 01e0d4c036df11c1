"""SGLang's processes for ``sglang_int4.py``: its schedulers can digest the weights with which they compute.

SGLang calls ``install`` in each of its processes (``benchmarks.engine.sglang_plugin``). The worker has one more endpoint, ``digest``, which
writes the SHA-256 of each parameter into a file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from miles_sglang import worker


def install() -> None:
    """Give SGLang's schedulers the method ``digest_weights``."""
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.digest_weights = digest


class Digesting(worker.Worker):
    """A worker that can digest the weights of its engine."""

    def __init__(self, engine: Any, writer: asyncio.StreamWriter) -> None:
        super().__init__(engine, writer)
        self.endpoints["digest"] = self.digest

    async def digest(self, body: dict[str, Any], _: bytes) -> None:
        """Write the digests of the first rank's parameters into the file ``body["path"]``."""
        await asyncio.to_thread(self.engine.collective_rpc, "digest_weights", path=body["path"])


def digest(scheduler: Any, path: str) -> None:
    """Runs in a scheduler: write the name and the digest of each parameter into a JSON file."""
    model = scheduler.tp_worker.model_runner.model
    found = {}
    for name, parameter in model.named_parameters():
        data = parameter.data.contiguous().reshape(-1).view(torch.uint8).cpu() if parameter.numel() else parameter.data
        found[name] = hashlib.sha256(data.cpu().numpy().tobytes() + str(tuple(parameter.shape)).encode()).hexdigest()
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    worker.main(int(sys.argv[1]), int(sys.argv[2]), Digesting)
