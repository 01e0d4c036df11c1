"""Errors that an agent receives, in the form of the OpenAI interface."""

from __future__ import annotations

from typing import Any

from miles_tools.http_server import ApiError


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "code": error.code, "param": None}}


def refuse(message: str, code: str = "invalid_request") -> ApiError:
    """Return the error of a request that can never succeed."""
    return ApiError(400, message, code)
