"""A process that calls tools: ``python -m miles_tool_calls.worker``.

Messages are JSON with a length of four bytes before them. The first one names the functions (``{"specs": [...]}``); each further one is a
call. Output of tools is discarded, so that it cannot mix with the messages. A process that a tool forks belongs to the worker's process
group and ends with it.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any, BinaryIO

LENGTH = struct.Struct(">I")


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """Read one message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    data: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(head)[0]))
    return data


def encode_message(data: dict[str, Any]) -> bytes:
    """Encode one message."""
    body = json.dumps(data).encode()
    return LENGTH.pack(len(body)) + body


def main() -> None:
    """Answer calls until standard input ends."""
    from miles_core.plugin import MilesError
    from miles_tool_calls.functions import load_functions

    requests, answers = _take_streams()
    first = read_message(requests)
    if first is None:
        return
    try:
        functions = {function.name: function for function in load_functions(tuple(first["specs"]))}
    except MilesError as error:
        answers.write(encode_message({"fault": str(error)}))
        answers.flush()
        return
    answers.write(encode_message({"ready": True}))
    answers.flush()
    while (call := read_message(requests)) is not None:
        answers.write(encode_message(_answer(functions[call["name"]], call)))
        answers.flush()


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Move standard input and output to other descriptors, and connect the usual ones to the null device."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    return requests, answers


def _answer(function: Any, call: dict[str, Any]) -> dict[str, Any]:
    from miles_core.data import describe_error
    from miles_tool_calls.functions import cut, to_answer

    limit, process = int(call["limit"]), os.getpid()
    try:
        arguments = function.bind(call["arguments"])
    except ValueError as error:
        return {"error": cut(f"wrong arguments: {error}", limit)}
    try:
        answer = to_answer(function.function(**arguments), limit)
    except BaseException as error:  # also sys.exit of a tool
        answer = {"error": cut(describe_error(error), limit)}
    if os.getpid() != process:  # this is a fork of the tool; only the original process answers
        os._exit(0)
    return answer


if __name__ == "__main__":
    sys.path[:] = [path or os.getcwd() for path in sys.path]
    main()
