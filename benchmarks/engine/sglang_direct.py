"""SGLang's process of ``sglang_engine.py``: it answers the engine, and measures SGLang itself when it is asked to.

One SGLang serves both, so the same arguments, caches and compiled kernels are under both numbers.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from miles_sglang import worker


class Measured(worker.Worker):
    """A worker that can also call SGLang directly."""

    def __init__(self, engine: Any, writer: asyncio.StreamWriter) -> None:
        super().__init__(engine, writer)
        self.endpoints["direct"] = self.direct

    async def direct(self, body: dict[str, Any], _: bytes) -> float:
        """Seconds of all requests: in one call, or with ``each`` in as many calls as there are."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        async def ask(prompts: Any) -> None:
            request = GenerateReqInput(
                input_ids=prompts,
                sampling_params=body["sampling"],
                return_logprob=body["log_probs"],
                return_routed_experts=body["routes"],
            )
            async for _ in self.manager.generate_request(request, None):
                pass

        started = time.perf_counter()
        if body["each"]:
            await asyncio.gather(*(ask(prompt) for prompt in body["prompts"]))
        else:
            await ask(body["prompts"])
        return time.perf_counter() - started


if __name__ == "__main__":
    worker.main(int(sys.argv[1]), int(sys.argv[2]), Measured)
