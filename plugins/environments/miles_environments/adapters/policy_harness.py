"""The harness of verifiers with which agents play here: it requests one answer per turn, in this process, and downloads nothing."""

from __future__ import annotations

import sys
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import SystemMessage, UserMessage

__all__ = ["PolicyHarness"]
#: Verifiers imports a harness as a top-level module with this name.
HARNESS = "miles_policy_harness"
sys.modules[HARNESS] = sys.modules[__name__]


class PolicyHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # the package may be absent
    """Requests one answer for each turn of the user."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
        messages = ([SystemMessage(content=system)] if system else []) + messages
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in messages]}
        url, headers = f"{endpoint}/chat/completions", {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
            client.post(url, json=body, headers=headers) as answer,
        ):
            return ProgramResult(int(answer.status != 200), "", await answer.text())
