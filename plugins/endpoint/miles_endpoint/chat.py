"""``POST /v1/chat/completions``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from miles_endpoint.call import Call, check_parameters, read_tool_choice, read_tools, read_whole
from miles_endpoint.messages import read_messages
from miles_endpoint.service import MAX_N, Models, Reply, read_sampling, usage_of

if TYPE_CHECKING:
    from miles_endpoint.session import Generated, Session


def prepare(body: Mapping[str, Any], session: Session, models: Models) -> Reply:
    """Check a request and return how to answer it.

    Raises:
        ApiError: the request is invalid.
    """
    check_parameters(body)
    policy = models.policy_of(body)
    sampling = read_sampling(body, session, models, policy, ("max_tokens", "max_completion_tokens"))
    tools = read_tools(body.get("tools"))
    call = Call(
        read_messages(body.get("messages"), session.reads_images),
        tools,
        with_call_stops(sampling, session, tools),
        policy,
        read_whole(body, "n", 1, MAX_N) or 1,
        read_tool_choice(body),
    )
    session.reader.check_tools(tools)

    def reply(answers: list[Generated]) -> dict[str, Any]:
        return _body(answers, body, session)

    include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return Reply(lambda: session.answer(call), reply, lambda whole: _events(whole, include_usage))


def with_call_stops(sampling: Any, session: Session, tools: Any) -> Any:
    """Add the tokens with which the model ends an answer with tool calls."""
    dialect = session.reader.dialect
    if not tools or dialect is None or not dialect.stops:
        return sampling
    return dataclasses.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *dialect.stops))


def _body(answers: list[Generated], request: Mapping[str, Any], session: Session) -> dict[str, Any]:
    choices = []
    for index, each in enumerate(answers):
        choice: dict[str, Any] = {
            "index": index,
            "message": each.answer.message(),
            "logprobs": logprobs_of(each.turn.response, session) if request.get("logprobs") else None,
            "finish_reason": each.finish,
        }
        if request.get("return_token_ids"):
            choice["token_ids"] = list(each.turn.response.tokens)
        choices.append(choice)
    body: dict[str, Any] = {
        "id": f"chatcmpl-{session.next_id()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.get("model", "default"),
        "choices": choices,
        "usage": usage_of(answers[0].turn.start, sum(len(each.turn.response.tokens) for each in answers)),
    }
    if request.get("return_token_ids"):
        body["prompt_token_ids"] = list(answers[0].turn.tokens[: answers[0].turn.start])
    return body


def logprobs_of(response: Any, session: Session) -> dict[str, Any]:
    """Return the log-probabilities of all tokens of a response, those of reasoning and calls included."""
    content = []
    for token, value in zip(response.tokens, response.log_probs, strict=True):
        text = str(session.ask.tokenizer.decode([token]))
        content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def _events(body: dict[str, Any], include_usage: bool) -> Iterator[bytes]:
    frame = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, **more}
        return event({**frame, "choices": [choice]})

    for choice in body["choices"]:
        index, message = choice["index"], choice["message"]
        more = {key: choice[key] for key in ("logprobs", "token_ids") if choice.get(key) is not None}
        yield chunk(index, {"role": "assistant", "content": ""}, **more)
        if message.get("reasoning_content"):
            yield chunk(index, {"reasoning_content": message["reasoning_content"]})
        if message["content"]:
            yield chunk(index, {"content": message["content"]})
        for number, call in enumerate(message.get("tool_calls", ())):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, choice["finish_reason"])
    if include_usage:
        yield event({**frame, "choices": [], "usage": body["usage"]})
    yield b"data: [DONE]\n\n"


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
