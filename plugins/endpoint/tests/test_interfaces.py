"""The three interfaces, limits, keys, repetitions, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time

import pytest

from miles_core.data import Renderer
from miles_core.rollout import tokenizing
from miles_endpoint import testing as C
from miles_endpoint.rollout import _find_fault as reward_fault
from miles_endpoint.testing import CALL, RESULT

USER = {"role": "user", "content": "sum"}


def test_chat_returns_what_the_engine_said(desk):
    async def main(d):
        reply = await d.chat("sum", logprobs=True, return_token_ids=True, max_tokens=9, temperature=0.3)
        body, (choice,) = reply.body, reply.body["choices"]
        assert choice["token_ids"] == d.encode("3 ok<|im_end|>") and body["prompt_token_ids"] == d.requests[0][0]
        assert [c["logprob"] for c in choice["logprobs"]["content"]] == d.transcript.turns[0].response.log_probs
        assert body["usage"] == {
            "prompt_tokens": len(d.requests[0][0]),
            "completion_tokens": 5,
            "total_tokens": len(d.requests[0][0]) + 5,
        }
        assert (d.requests[0][1].max_new_tokens, d.requests[0][1].temperature) == (9, 1.0)  # the run's temperature
        await d.chat("sum", model="judge", temperature=0.3, max_completion_tokens=1000)
        assert (d.requests[1][1].max_new_tokens, d.requests[1][1].temperature, d.requests[1][2]) == (64, 0.3, "judge")

    d = desk(["3 ok<|im_end|>", "4<|im_end|>"], main)
    assert d.session.counts["overridden"] == 1


def test_images_in_messages_become_media(desk):
    """The renderer expands ``{"type": "image"}`` to what the model reads; the desk's template writes a list of parts as it is."""
    urls = [f"data:image/png;base64,{code}" for code in ("AAAA", "AAAB")]

    def user(url, text="what?"):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        return {"role": "user", "content": parts}

    async def main(d):
        refused = await d.post({"messages": [user(urls[0])]})
        assert refused.status == 400 and "reads text only" in refused.body["error"]["message"]
        d.renderer.expand = lambda text, media: text
        first = await d.post({"messages": [user(urls[0])]})
        answer = {"role": "assistant", "content": first.message["content"]}
        await d.post({"messages": [user(urls[0]), answer, user(urls[1], "and?")]})
        await d.post(
            {"messages": [user(urls[1]), answer, user(urls[1], "and?")]}
        )  # another first image: another conversation
        bad = await d.post({"messages": [user("https://x.org/a.png")]})
        assert bad.status == 400 and "the address https://x.org/a.png" in bad.body["error"]["message"]

    d = desk(["red<|im_end|>", "blue<|im_end|>", "green<|im_end|>"], main)
    assert [[m.read() for m in media] for media in d.media] == [[b"\0\0\0"], [b"\0\0\0", b"\0\0\1"], [b"\0\0\1"] * 2]
    assert d.transcript.branches == 1 and [len(turn.media) for turn in d.transcript.turns] == [1, 2, 2]


def test_images_of_responses_become_media_of_users_and_functions(desk):
    """A stored response keeps those of its input."""
    urls = [f"data:image/png;base64,{code}" for code in ("AAAA", "AAAB", "AAAC")]
    shown = [[{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what?"}] for url in urls]

    async def main(d):
        async def ask(*items, **more):
            return await d.post({"input": list(items), **more}, "/v1/responses")

        refused = await ask({"role": "user", "content": shown[0]})
        assert refused.status == 400 and "reads text only" in refused.body["error"]["message"]
        d.renderer.expand = lambda text, media: text
        first = await ask({"role": "user", "content": shown[0]})
        result = {"type": "function_call_output", "call_id": "a", "output": shown[1]}
        call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
        await ask(call, result, previous_response_id=first.body["id"])
        for items, words in (
            ([{"role": "assistant", "content": shown[2]}], "input[0].content holds a part of the type 'input_image'"),
            (
                [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x.org/a.png"}]}],
                "the address https://x.org/a.png",
            ),
            (
                [{"role": "user", "content": [{"type": "input_audio", "data": "AAAA"}]}],
                "only images are passed to a model",
            ),
        ):
            bad = await ask(*items)
            assert bad.status == 400 and words in bad.body["error"]["message"], bad.body

    d = desk(["red<|im_end|>", "blue<|im_end|>"], main)
    assert [[m.read() for m in media] for media in d.media] == [[b"\0\0\0"], [b"\0\0\0", b"\0\0\1"]]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_continue_token_by_token(desk, stream):
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]

    async def main(d):
        async def ask(given, **more):
            reply = await d.post(
                {"input": given, "instructions": "be brief", "tools": tools, "stream": stream, **more}, "/v1/responses"
            )
            assert reply.status == 200
            if not stream:
                return reply.body
            assert [e["sequence_number"] for e in reply.events] == list(range(len(reply.events)))
            final = reply.events[-1]["response"]
            done = [e["item"] for e in reply.events if e["type"] == "response.output_item.done"]
            assert done == final["output"] and reply.events[-1]["type"] == "response.completed"
            text = "".join(e["delta"] for e in reply.events if e["type"] == "response.function_call_arguments.delta")
            assert text == "".join(i["arguments"] for i in done if i["type"] == "function_call")
            return final

        first = await ask("sum")
        assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "3"}
        items = [{"role": "user", "content": "sum"}, *first["output"], result]
        second = await ask(items)
        assert second["output"][-1]["content"][0]["text"] == "3" and second["usage"]["input_tokens"] == len(
            d.requests[1][0]
        )
        await ask(
            [{"role": "user", "content": [{"type": "input_text", "text": "more"}]}], previous_response_id=second["id"]
        )

    d = desk(["<think>\nadd\n</think>\n\n" + CALL, "3<|im_end|>", "4<|im_end|>"], main)
    assert not d.branches and len(d.check()) == 1 and len(d.transcript.turns) == 3


def test_two_calls_of_a_response_are_one_message(desk):
    async def main(d):
        body = {"tools": [{"type": "function", "name": "add"}]}
        first = (await d.post({"input": "sum", **body}, "/v1/responses")).body
        results = [{"type": "function_call_output", "call_id": i["call_id"], "output": "3"} for i in first["output"]]
        await d.post({"input": [USER, *first["output"], *results], **body}, "/v1/responses")

    d = desk([CALL.replace("<|im_end|>", "\n" + CALL), "3<|im_end|>"], main)
    assert not d.branches and len(d.check()) == 1


def test_completions_continue_text_and_ids(desk):
    async def main(d):
        first = await d.post({"prompt": "ab to", "stop": ["Obs:"], "logprobs": 1}, "/v1/completions")
        (choice,) = first.body["choices"]
        assert choice["text"] == " think " and len(choice["logprobs"]["token_logprobs"]) == len(d.encode(" think Obs:"))
        second = await d.post({"prompt": "ab to think Obs: abc", "n": 2}, "/v1/completions")
        assert second.body["choices"][1]["text"] == "no"
        assert d.transcript.turns[1].prompt == tuple(d.tokenizer.encode(" abc", add_special_tokens=False))
        await d.post({"prompt": [*d.transcript.turns[1].tokens, 5]}, "/v1/completions")
        await d.post({"prompt": "something else"}, "/v1/completions")

    d = desk([" think Obs:", "so<|im_end|>", "no", "x", "y"], main)
    turns = d.transcript.turns
    assert [turn.parent for turn in turns] == [None, turns[0], turns[0], turns[1], None]
    assert not d.branches and len(d.check()) == 3


def test_a_text_after_an_end_token_is_a_branch(desk):
    async def main(d):
        await d.post({"prompt": "ab"}, "/v1/completions")
        await d.post({"prompt": "abto more"}, "/v1/completions")

    d = desk(["to<|im_end|>", "x"], main)
    assert d.branches == {"stop_token": 1} and len(d.check()) == 2


def test_streams_of_completions(desk):
    async def main(d):
        reply = await d.post({"prompt": "ab", "stream": True}, "/v1/completions")
        assert "".join(c["text"] for e in reply.events for c in e["choices"]) == "to" and reply.raw.endswith(
            b"[DONE]\n\n"
        )

    desk(["to"], main)


def test_models(desk):
    async def main(d):
        listed = await d.post(b"", "/v1/models", method="GET")
        assert [card["id"] for card in listed.body["data"]] == ["default", "policy", "judge"]
        assert (await d.post(b"", "/v1/models/judge", method="GET")).body["id"] == "judge"
        assert (await d.post(b"", "/v1/models/gpt", method="GET")).status == 404

    desk([], main)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"model": "gpt-4o", "messages": [USER]},
            "the model 'gpt-4o' does not exist; the models of this run are default, policy, judge",
        ),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": ["hi"]}, r"messages\[0\] must be an object, got 'hi'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of the type 'image_url'; this model reads text",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "content must be a text or a list of parts, got int"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format=.* is not supported"),
        ({"messages": [USER], "top_logprobs": 5}, "top_logprobs=5 is not supported"),
        ({"messages": [USER], "n": 0}, "n is 0; it must be a whole number from 1 to 128"),
        ({"messages": [USER], "max_tokens": "many"}, "max_tokens is 'many'; it must be a whole number"),
        ({"messages": [USER], "stop": 3}, "stop is 3; it must be a text or a list of texts"),
        ({"messages": [USER], "stop": [""]}, "stop is .*; it must be a text or a list of texts"),
        ({"messages": [USER], "tools": {}}, "tools must be a list"),
        (
            {"messages": [USER], "tools": [{"type": "web_search"}]},
            r"tools\[0\] is of the type 'web_search'; this endpoint has function",
        ),
        (
            {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
            "must be a JSON schema",
        ),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice='required' forces a call"),
        (b"{", "the body is not JSON"),
        (b"[" * 60_000, "the body is not JSON"),
        (b"[]", "the body must be a JSON object, got list"),
        (b"x" * 100_001, "the request has 100001 bytes or more; --endpoint-max-body is 100000"),
    ],
)
def test_what_is_refused_in_one_sentence(desk, body, words):
    async def main(d):
        reply = await d.post(body)
        assert reply.status in (400, 404, 413) and reply.headers["x-should-retry"] == "false"
        message = reply.body["error"]["message"]
        assert re.search(words, message), message
        assert message.startswith("sample 7: ") and "\n" not in message

    d = desk([], main)
    assert not d.transcript.turns and d.session.counts["refused"] == 1


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {}, "there is no POST /v1/embeddings"),
        ("/v1/completions", {"prompt": ""}, "prompt must be a text, a list of token ids"),
        ("/v1/completions", {"prompt": [9999]}, "prompt holds a token id outside of 0 to"),
        ("/v1/completions", {"prompt": "a", "logprobs": 5}, "logprobs=5 is not supported"),
        ("/v1/responses", {"input": None}, "input must be a text or a list of items"),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, "of the type 'computer_call'"),
        (
            "/v1/responses",
            {"input": "a", "previous_response_id": "resp_x"},
            "'resp_x' is not a stored response of this sample",
        ),
    ],
)
def test_what_other_paths_refuse(desk, path, body, words):
    async def main(d):
        reply = await d.post(body, path)
        assert reply.status in (400, 404) and words in reply.body["error"]["message"]

    desk([], main)


def test_keys(desk):
    async def main(d):
        d.open()
        for header in ("Bearer nothing", "", "Basic x", f"Basic {d.token}"):
            reply = await d.post({"messages": [USER]}, authorization=header)
            assert reply.status == 401 and "no sample has this API key" in reply.body["error"]["message"]
            assert d.token not in reply.raw.decode()

    desk([], main)


def test_a_template_without_tools_refuses_them(desk):
    plain = (
        "{%- for m in messages -%}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant: {% endif -%}"
    )

    async def main(d):
        reply = await d.chat("sum", tools=C.TOOLS)
        assert (
            reply.status == 400
            and "this model cannot be offered tools: the chat template" in reply.body["error"]["message"]
        )
        assert (await d.chat("sum")).message["content"] == "<tool_call>3"

    desk(["<tool_call>3<|im_end|>"], main, template=plain)


def test_the_context_ends(desk):
    async def main(d):
        first = await d.chat("sum")
        assert d.requests[0][1].max_new_tokens == 60 - len(d.requests[0][0])
        reply = await d.chat("sum", first.message, "more " * 10)
        assert reply.status == 400 and reply.body["error"]["code"] == "context_length_exceeded"
        assert "the maximum context length is 60 tokens" in reply.body["error"]["message"]

    desk(["3<|im_end|>"], main, context=60)


def test_the_turns_end(desk):
    async def main(d):
        assert (await d.chat("sum", n=3)).status == 400
        assert (await d.chat("sum", n=2)).status == 200
        reply = await d.chat("sum")
        assert (
            reply.body["error"]["code"] == "turn_limit"
            and "sample 7: it has had 2 answers" in reply.body["error"]["message"]
        )

    desk(["3<|im_end|>", "4<|im_end|>"], main, turns=2)


def test_a_repeated_request_joins_the_one_in_flight_and_is_answered_again_later(desk):
    gate, gone = asyncio.Event(), asyncio.Event()

    async def main(d):
        lost = asyncio.ensure_future(d.post({"messages": [USER]}, gone=gone))
        await asyncio.sleep(0.01)
        gone.set()
        assert (await lost).status == 0  # the client left
        second = asyncio.ensure_future(d.post({"messages": [USER]}, x_stainless_retry_count="1"))
        await asyncio.sleep(0.01)
        gate.set()
        third = await d.post({"messages": [USER]}, x_stainless_retry_count="2")
        assert (await second).message == third.message and len(d.requests) == 1
        fourth = await d.post({"messages": [USER]}, x_stainless_retry_count="0")  # another sample of the same prompt
        assert fourth.message["content"] == "4"
        fifth = await d.post({"messages": [USER]}, idempotency_key="k")
        assert (await d.post({"messages": [USER]}, idempotency_key="k")).message == fifth.message
        await d.close()

    d = desk([(gate, "3<|im_end|>"), "4<|im_end|>", "5<|im_end|>"], main)
    assert d.session.counts["replayed"] == 3 and len(d.check()) == 3 and not d.session.counts["undelivered"]


def test_an_answer_that_no_client_received_is_not_trained(desk):
    gate, gone = asyncio.Event(), asyncio.Event()

    async def main(d):
        await d.chat("first")
        lost = asyncio.ensure_future(d.post({"messages": [USER]}, gone=gone))
        await asyncio.sleep(0.01)
        gone.set()
        await lost
        gate.set()
        await asyncio.sleep(0.01)
        await d.close()

    d = desk(["4<|im_end|>", (gate, "3<|im_end|>")], main)
    assert d.session.counts["undelivered"] == 1 and len(d.transcript.turns) == 2 and len(d.check()) == 1


def test_too_many_requests_at_once(desk):
    gate = asyncio.Event()

    async def main(d):
        first = asyncio.ensure_future(d.chat("sum"))
        await asyncio.sleep(0.01)
        reply = await d.chat("other")
        assert reply.status == 429 and "x-should-retry" not in reply.headers
        assert "it has 1 requests in flight, which is the maximum" in str(reply.body)
        gate.set()
        assert (await first).status == 200 and (await d.chat("other")).status == 200

    desk([(gate, "3<|im_end|>"), "4<|im_end|>"], main, calls=1)


def test_an_engine_that_fails_ends_the_session(desk):
    async def main(d):
        assert (await d.chat("sum")).status == 503
        with pytest.raises(OSError, match="gone"):
            await d.session.failure

    desk([OSError("gone")], main)


def test_time_is_divided_between_engine_and_agent(desk):
    gate = asyncio.Event()

    async def main(d):
        d.open()
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_later(0.1, gate.set)
        await d.chat("sum")
        assert 0.09 < d.session.engine_seconds < 0.5 and 0.04 < d.session.agent_seconds < 0.4

    desk([(gate, "3<|im_end|>")], main)


def test_no_body_ends_more_than_its_request(desk):
    """Bodies in which any value is replaced by another one: every reply is a sentence or an answer, and the session goes on."""
    random_ = random.Random(0)
    odd = [
        None,
        0,
        -1,
        1.5,
        True,
        "",
        "x",
        "\ud800",
        [],
        {},
        [None],
        [[]],
        {"type": "function"},
        [{"role": "assistant"}],
        10**400,
    ]
    chat = {
        "model": "policy", "n": 1, "stop": ["a"], "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
        "tools": C.TOOLS, "logprobs": False,
        "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "b"}], "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "c", "content": "3"}],
    }  # fmt: skip
    items = [
        USER,
        {"type": "reasoning", "summary": [{"text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
    ]
    response = {
        "input": [*items, {"type": "function_call_output", "call_id": "c", "output": "3"}],
        "tools": [{"type": "function", "name": "add"}],
    }
    bodies = [
        ("/v1/chat/completions", chat),
        ("/v1/responses", response),
        ("/v1/completions", {"prompt": ["a", [1, 2]], "logprobs": 1}),
    ]

    def places(value):
        for key, item in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            yield value, key
            yield from places(item)

    async def main(d):
        seen = set()
        for _ in range(400):
            path, body = random_.choice(bodies)
            body = json.loads(json.dumps(body))
            holder, key = random_.choice(list(places(body)))
            holder[key] = random_.choice(odd)
            d.script = [CALL] * 200
            reply = await d.post(body, path)
            seen.add(reply.status)
            assert reply.status in (200, 400, 404) and not d.session.failure.done(), (path, body, reply)
            assert reply.status == 200 or "\n" not in reply.body["error"]["message"]
        assert seen >= {200, 400}

    desk([], main).check()


async def _send_raw(d, *parts, pause=0.0):
    """Send bytes to the endpoint until it closes the connection; returns (its answer, how many parts were sent)."""
    if d.session is None:
        d.open()
        await d.server.start()
    url = d.server.url.removeprefix("http://").removesuffix("/v1")
    host, _, port = url.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url}\r\nauthorization: Bearer {d.token}\r\n"
    writer.write(head.encode() + parts[0])
    answer, sent = asyncio.ensure_future(reader.read()), 1
    with contextlib.suppress(ConnectionError):
        for part in parts[1:]:
            if answer.done():
                break
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
            sent += 1
    with contextlib.suppress(ConnectionError):
        return (await asyncio.wait_for(answer, 20)).decode(), sent
    return "", sent


def test_a_body_is_cut_off_while_it_arrives(desk):
    """Without a length the server counts; it does not receive the rest of a body that is too long."""

    async def main(d):
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        answer, sent = await _send_raw(d, b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 300, pause=0.005)
        assert "413" in answer.partition("\r\n")[0] and "connection: close" in answer.lower()
        assert sent < 250
        said, sent = await _send_raw(d, b"content-length: 100000000\r\n\r\n", *[b"x" * 65536] * 300, pause=0.005)
        assert "413" in said.partition("\r\n")[0] and "connection: close" in said.lower() and sent < 250
        await d.server.stop()

    desk([], main)


@pytest.mark.parametrize("order", [0, 1])
def test_two_length_headers_are_refused(desk, order):
    lines = [b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n"]

    async def main(d):
        body = b"".join(lines[:: -1 if order else 1]) + b"\r\n2\r\n{}\r\n0\r\n\r\n"
        answer, _ = await _send_raw(d, body)
        assert "400" in answer.partition("\r\n")[0] and "connection: close" in answer.lower()
        assert answer.count("HTTP/1.1") == 1
        await d.server.stop()

    desk([], main)


def test_a_message_of_megabytes_does_not_hold_the_event_loop(desk):
    async def main(d):
        d.server.max_body = 10**7
        work = asyncio.ensure_future(d.chat("hello world, this is some text\n" * 12_000))
        begin = last = time.monotonic()
        longest = 0.0
        while not work.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        reply = work.result()
        assert reply.status == 400 and "leaves no room for an answer" in reply.body["error"]["message"]
        assert longest < (last - begin) / 2

    desk([], main, context=1000)


def test_rendering_is_limited_in_time(desk, monkeypatch):
    monkeypatch.setattr(tokenizing, "SECONDS", 0.05)
    monkeypatch.setattr(Renderer, "render", lambda *rest: time.sleep(0.5))

    async def main(d):
        reply = await d.chat("x" * 20_000)
        assert reply.status == 400 and "takes longer than 0.05 seconds" in reply.body["error"]["message"]

    desk([], main)


def test_half_a_surrogate_pair_in_a_conversation_and_in_a_call(desk):
    half = CALL.replace('"a": 1', '"a": "\\ud800"')

    async def main(d):
        first = await d.chat("sum \ud83d", tools=C.TOOLS)
        assert json.loads(first.message["tool_calls"][0]["function"]["arguments"])["a"] == "\ufffd"
        result = {**RESULT, "content": "\ude00\x00"}
        assert (await d.chat("sum \ud83d", first.message, result, tools=C.TOOLS)).status == 200
        assert (await d.post({"prompt": "a\ud800", "max_tokens": 2}, "/v1/completions")).status == 200

    d = desk([half, "3<|im_end|>", "ab"], main)
    assert not d.branches


def test_an_agents_reward_of_any_size_is_no_error_of_the_run():
    assert reward_fault(10**400) and reward_fault(1e300) and reward_fault(float("nan")) and not reward_fault(1.5)
