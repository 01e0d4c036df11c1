"""Episodes of programs that request the model's answers from a chat endpoint (OpenAI's interface), such as agents and simulated users.

The program runs until it ends, somewhere else. Each of its requests is an observation, and the next answer of the model completes it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

from miles_environments.environment import EnvironmentFault, Episode, Step


class Conversation(Episode):
    """One episode of a program. ``begin`` starts it; its future is the reward of the whole episode."""

    def __init__(self, begin: Callable[[Conversation], Future[float]]) -> None:
        self._begin = begin
        self._program: Future[float] | None = None
        self._closed = False
        self._requests: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()  # None: the program has ended
        self._answers: SimpleQueue[str | None] = SimpleQueue()  # None: the episode is closed
        self._seen: list[tuple[str, str]] = []

    def complete(self, body: Mapping[str, Any]) -> str | None:
        """Wait for the model's answer to a request; None if the episode is closed."""
        self._requests.put(body)
        return None if self._closed else self._answers.get()

    def reset(self) -> str:
        self._program = self._begin(self)
        self._program.add_done_callback(lambda _: self._requests.put(None))
        if self._closed:
            self._program.cancel()
        body = self._requests.get()
        if body is None:
            self._program.result()
            raise EnvironmentFault("the program ended before it requested an answer")
        return self._read(body)

    def step(self, action: str) -> Step:
        assert self._program is not None  # started by ``reset``
        self._seen.append(("assistant", action))
        self._answers.put(action)
        body = self._requests.get()
        return Step("", self._program.result(), True) if body is None else Step(self._read(body), 0.0, False)

    def close(self) -> None:
        self._closed = True
        self._answers.put(None)
        self._requests.put(None)
        if self._program is not None:
            self._program.cancel()

    def _read(self, body: Mapping[str, Any]) -> str:
        """Return the text that a request adds to the conversation so far."""
        if body.get("tools"):
            raise EnvironmentFault("the program offers tools, and the answers here are texts")
        messages = [(str(message["role"]), _text(message.get("content"))) for message in body["messages"]]
        count = len(self._seen)
        if [_mark(*message) for message in messages[:count]] != [_mark(*message) for message in self._seen]:
            raise EnvironmentFault(
                "a request does not continue the conversation (the program began another one, or changed a message), and an episode is one "
                "conversation"
            )
        new = messages[count:]
        if count == 0:
            self.instructions = "\n\n".join(text for role, text in new if role in ("system", "developer"))
            new = [(role, text) for role, text in new if role not in ("system", "developer")]
        if not new or any(role != "user" for role, _ in new):
            raise EnvironmentFault(
                f"the program adds messages of {[role for role, _ in new]}; here it may add those of the user"
            )
        self._seen = messages
        return "\n\n".join(text for _, text in new)


def _mark(role: str, text: str) -> tuple[str, str]:
    """Return what two messages have in common. Programs may strip the text of an answer; it is in the transcript already."""
    return role, "" if role == "assistant" else text


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise EnvironmentFault(
            f"a message of the program has parts of {[part.get('type') for part in content]}; here they are texts"
        )
    return "".join(part["text"] for part in content)


class Endpoint:
    """A chat endpoint on the loopback interface. The header ``header`` of a request is the key of its conversation.

    Attributes:
        url: the base URL, for clients that append ``/chat/completions``.
        conversations: the open conversations by key.
    """

    def __init__(self, header: str) -> None:
        self.conversations: dict[str, Conversation] = {}
        self._header = header
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = endpoint.answer(self.headers.get(header, ""), body)
                with contextlib.suppress(ConnectionError):  # the program may have ended
                    self.reply(status, json.dumps(answer).encode())

            def reply(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """The requests are those of the run's own programs."""

        self._server = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 1024})(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, key: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body of the answer to a request."""
        conversation = self.conversations.get(key)
        if conversation is None:
            return 404, {"error": {"message": f"no episode has the {self._header} {key!r:.80}"}}
        if body.get("stream"):
            return 400, {"error": {"message": "this endpoint does not stream; leave out stream"}}
        text = conversation.complete(body)
        if text is None:
            return 410, {"error": {"message": "the episode was closed"}}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        named = {"id": "answer", "object": "chat.completion", "created": 0, "model": str(body.get("model", ""))}
        return 200, {**named, "choices": [choice], "usage": usage}

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
