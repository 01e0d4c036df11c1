"""Requests of one moment on their way to SGLang's scheduler."""

from __future__ import annotations

import asyncio
import copy
from typing import Any


class Together:
    """Takes the place of a tokenizer manager's way to its scheduler: requests that arrive in one turn of the loop go in one message.

    A scheduler begins with what it finds, so requests that trickle in are prefilled in many small batches, each of which
    holds up the decoding of all others. SGLang itself sends a list of prompts in one message; ours are separate requests.

    Args:
        manager: an ``sglang`` tokenizer manager, from now on sending through this.
    """

    def __init__(self, manager: Any) -> None:
        self._send = manager._dispatch_to_scheduler
        self._waiting: list[Any] = []
        manager._dispatch_to_scheduler = self

    def __call__(self, message: Any) -> None:
        """Send ``message``; a request only when the turn is over, anything else after the requests before it."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

        if not isinstance(message, TokenizedGenerateReqInput):
            self._flush()
            self._send(message)
            return
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(copy.copy(message))  # the manager unpacks its own again

    def _flush(self) -> None:
        from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput

        waiting, self._waiting = self._waiting, []
        if waiting:
            self._send(waiting[0] if len(waiting) == 1 else BatchTokenizedGenerateReqInput(batch=waiting))
