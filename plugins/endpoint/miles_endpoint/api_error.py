"""Errors that an agent receives, in the form of the OpenAI interface."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A refused request.

    Attributes:
        status: HTTP status.
        message: one sentence for the agent's log.
        code: machine-readable reason.
        retry: whether the same request may succeed later.
    """

    def __init__(self, status: int, message: str, code: str, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry = status, message, code, retry

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "code": self.code, "param": None}}


def refuse(message: str, code: str = "invalid_request") -> ApiError:
    """Return the error of a request that can never succeed."""
    return ApiError(400, message, code)
