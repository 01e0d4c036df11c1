"""``POST /v1/responses``: the interface that some agent libraries use by default.

Items of the input become chat messages: function calls join the assistant's message before them, and reasoning joins the answer after it.
``previous_response_id`` continues a response of the same session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from miles_endpoint.answer import wire_call
from miles_endpoint.api_error import refuse
from miles_endpoint.call import Call, check_parameters, read_tool_choice, read_tools
from miles_endpoint.chat import event, with_call_stops
from miles_endpoint.messages import read_content, read_messages
from miles_endpoint.service import Models, Reply, read_sampling, usage_of

if TYPE_CHECKING:
    from miles_endpoint.session import Generated, Session


def prepare(body: Mapping[str, Any], session: Session, models: Models) -> Reply:
    """Check a request and return how to answer it.

    Raises:
        ApiError: the request is invalid.
    """
    check_parameters(body)
    policy = models.policy_of(body)
    sampling = read_sampling(body, session, models, policy, ("max_output_tokens",))
    tools = read_tools(body.get("tools"), flat=True)
    history = _history(body, session)
    instructions = body.get("instructions")
    head = [{"role": "system", "content": instructions}] if instructions else []
    messages = read_messages([*head, *history], session.reads_images)
    call = Call(messages, tools, with_call_stops(sampling, session, tools), policy, 1, read_tool_choice(body))
    session.reader.check_tools(tools)

    def reply(answers: list[Generated]) -> dict[str, Any]:
        made = _body(answers[0], body, session)
        if body.get("store") is not False:
            session.stored[made["id"]] = (*history, answers[0].answer.message())
        return made

    return Reply(lambda: session.answer(call), reply, _events)


def _history(body: Mapping[str, Any], session: Session) -> list[dict[str, Any]]:
    """Return the messages of the previous response and of the input."""
    previous = body.get("previous_response_id")
    if previous is not None and previous not in session.stored:
        raise refuse(
            f"previous_response_id {previous!r:.60} is not a stored response of this sample",
            "previous_response_not_found",
        )
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise refuse(f"input must be a text or a list of items, got {given!r:.60}")
    return [*session.stored.get(str(previous), ()), *to_messages(items, session.reads_images)]


def to_messages(items: list[Any], images: bool = False) -> list[dict[str, Any]]:
    """Convert input items to chat messages. ``images``: whether the model reads images, in messages of users and results of functions.

    Raises:
        ApiError: an item is of a type that the endpoint does not have.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for number, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "reasoning":
            reasoning = _reasoning_text(item)
            continue
        if kind == "message":
            shown = images and item.get("role") == "user"
            message = {
                "role": item.get("role"),
                "content": read_content(item.get("content"), f"input[{number}]", shown),
            }
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            made = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant" and not reasoning:
                messages[-1].setdefault("tool_calls", []).append(made)
                continue
            message = {"role": "assistant", "content": "", "tool_calls": [made]}
        elif kind == "function_call_output":
            message = {
                "role": "tool",
                "tool_call_id": item.get("call_id"),
                "content": read_content(item.get("output"), f"input[{number}]", images),
            }
        else:
            raise refuse(
                f"input[{number}] is of the type {kind!r:.40}; the types are message, reasoning, function_call, function_call_output"
            )
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
            reasoning = ""
        messages.append(message)
    return messages


def _reasoning_text(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _body(each: Generated, request: Mapping[str, Any], session: Session) -> dict[str, Any]:
    number = session.next_id()
    answer, output = each.answer, []
    if answer.reasoning:
        part = {"type": "reasoning_text", "text": answer.reasoning}
        output.append(
            {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [part], "status": "completed"}
        )
    if answer.content or not answer.calls:
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        output.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [text]}
        )
    for i, call in enumerate(answer.calls):
        function = wire_call(call)["function"]
        item = {
            "type": "function_call",
            "id": f"fc_{number}_{i}",
            "call_id": call["id"],
            "status": "completed",
            **function,
        }
        output.append(item)
    length = each.finish == "length"
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if length else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if length else None,
        "error": None,
        "instructions": request.get("instructions"),
        "metadata": request.get("metadata") or {},
        "model": request.get("model", "default"),
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": request.get("previous_response_id"),
        "temperature": session.ask.sampling.temperature,
        "top_p": session.ask.sampling.top_p,
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "usage": usage_of(each.turn.start, len(each.turn.response.tokens), "input output") | details,
    }


def _events(body: dict[str, Any]) -> Iterator[bytes]:
    number = 0

    def send(event_type: str, /, **data: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": event_type, "sequence_number": number - 1, **data}, event_type)

    started = {**body, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield send("response.created", response=started)
    yield send("response.in_progress", response=started)
    for index, item in enumerate(body["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        key = {"function_call": "arguments", "message": "content", "reasoning": "content"}[item["type"]]
        yield send(
            "response.output_item.added", output_index=index, item={**item, key: item[key][:0], "status": "in_progress"}
        )
        if item["type"] == "function_call":
            yield send("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield send("response.function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"])
        else:
            part = item["content"][0]
            kind = part["type"]
            yield send("response.content_part.added", **place, content_index=0, part={**part, "text": ""})
            extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            yield send(f"response.{kind}.delta", **place, content_index=0, delta=part["text"], **extra)
            yield send(f"response.{kind}.done", **place, content_index=0, text=part["text"], **extra)
            yield send("response.content_part.done", **place, content_index=0, part=part)
        yield send("response.output_item.done", output_index=index, item=item)
    yield send(f"response.{body['status']}", response=body)
