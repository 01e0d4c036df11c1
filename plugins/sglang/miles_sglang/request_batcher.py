"""Sends requests that arrive together to SGLang's scheduler in one message."""

from __future__ import annotations

import asyncio
import copy
from typing import Any


class RequestBatcher:
    """Replaces a tokenizer manager's send function; requests of one event loop iteration are sent in one message.

    A scheduler starts with the requests it has, so requests that arrive one by one are prefilled in many small batches, and each of
    these delays the decoding of all others. SGLang batches only prompts of one request; a run sends separate requests.

    Args:
        manager: an ``sglang`` tokenizer manager; the constructor replaces its send function.
    """

    def __init__(self, manager: Any) -> None:
        self._send = manager._dispatch_to_scheduler
        self._waiting: list[Any] = []
        manager._dispatch_to_scheduler = self

    def __call__(self, message: Any) -> None:
        """Queue a request until the end of the loop iteration; send any other message now, after the queued requests."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

        if not isinstance(message, TokenizedGenerateReqInput):
            self._flush()
            self._send(message)
            return
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(copy.copy(message))  # the manager modifies its message after this call

    def _flush(self) -> None:
        from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput

        waiting, self._waiting = self._waiting, []
        if waiting:
            self._send(waiting[0] if len(waiting) == 1 else BatchTokenizedGenerateReqInput(batch=waiting))
