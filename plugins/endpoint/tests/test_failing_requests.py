"""The known ways in which agents' requests make transcripts inexact: each is handled, or is a counted new branch.

The markers name them, as in ``test_failures.py``.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from miles_core.engine import Response
from miles_endpoint import testing as C
from miles_endpoint.testing import CALL, RESULT


@pytest.mark.failure(15, "a first turn that is sent again")
def test_a_first_turn_that_is_sent_again_is_answered(desk):
    async def main(d):
        replies = [await d.chat("sum") for _ in range(3)]
        assert [r.status for r in replies] == [200] * 3
        await d.chat("sum", replies[1].message, "more")

    d = desk(["3<|im_end|>", "4<|im_end|>", "5<|im_end|>", "6<|im_end|>"], main)
    assert not d.branches and len(d.check()) == 3 and d.transcript.turns[3].parent is d.transcript.turns[1]


@pytest.mark.failure(16, "a refused retry that destroys the history")
def test_a_refused_request_leaves_the_history(desk):
    async def main(d):
        first = await d.chat("sum")
        bad = await d.chat("sum", first.message, {"role": "alien", "content": "x"})
        worse = await d.chat("sum", first.message, "more", seed=3)
        assert (bad.status, worse.status) == (400, 400) and bad.headers["x-should-retry"] == "false"
        assert "messages[2] has the role 'alien'" in bad.body["error"]["message"]
        assert (await d.chat("sum", first.message, "more")).status == 200

    d = desk(["3<|im_end|>", "4<|im_end|>"], main)
    assert not d.branches and len(d.check()) == 1 and d.session.counts["refused"] == 2


@pytest.mark.failure(17, "sub-agents")
def test_sub_agents_have_conversations_of_their_own(desk):
    async def main(d):
        first = await d.chat("sum", tools=C.TOOLS)
        sub = await d.chat({"role": "system", "content": "you check"}, "is 3 right?")
        await d.chat({"role": "system", "content": "you check"}, "is 3 right?", sub.message, "sure?")
        await d.chat("sum", first.message, RESULT, tools=C.TOOLS)

    d = desk([CALL, "yes<|im_end|>", "very<|im_end|>", "3<|im_end|>"], main)
    assert not d.branches and d.session.counts["conversations"] == 2 and len(d.check()) == 2


@pytest.mark.failure(18, "best of n that continues an older branch")
def test_best_of_n_may_go_on_with_an_older_answer(desk):
    async def main(d):
        reply = await d.chat("sum", n=3)
        messages = [choice["message"] for choice in reply.body["choices"]]
        assert [m["content"] for m in messages] == ["3", "4", "5"]
        await d.chat("sum", messages[0], "more")
        await d.chat("sum", messages[2], "more")

    d = desk(["3<|im_end|>", "4<|im_end|>", "5<|im_end|>", "6<|im_end|>", "7<|im_end|>"], main)
    turns = d.transcript.turns
    assert not d.branches and len(d.check()) == 3 and (turns[3].parent, turns[4].parent) == (turns[0], turns[2])


@pytest.mark.failure(19, "compaction")
def test_compaction_starts_a_branch(desk):
    async def main(d):
        first = await d.chat("sum")
        second = await d.chat("sum", first.message, "more")
        summary = {"role": "assistant", "content": "so far: 3, 4"}
        third = await d.chat("sum", summary, "and?")
        await d.chat("sum", summary, "and?", third.message, "end")
        assert second.status == 200

    d = desk(["3<|im_end|>", "4<|im_end|>", "5<|im_end|>", "6<|im_end|>"], main)
    assert d.branches == {"edited": 1} and len(d.check()) == 2
    assert d.transcript.turns[3].parent is d.transcript.turns[2]


@pytest.mark.failure(20, "the same messages with other tools")
def test_the_same_messages_with_other_tools(desk):
    async def main(d):
        first = await d.chat("sum", tools=C.TOOLS)
        await d.chat("sum", first.message, RESULT)

    d = desk([CALL, "3<|im_end|>"], main)
    assert d.branches == {"tools": 1} and len(d.check()) == 2 and "adds" not in d.tokenizer.decode(d.requests[1][0])


@pytest.mark.failure(21, "arguments that are not a JSON object")
@pytest.mark.parametrize("arguments", ["[1, 2]", '"text"', "{bad", "3"])
def test_arguments_that_are_no_object(desk, arguments):
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'

    async def main(d):
        first = await d.chat("sum", tools=C.TOOLS)
        assert first.message["content"] == text and "tool_calls" not in first.message
        second = await d.chat("sum", first.message, "write an object", tools=C.TOOLS)
        assert second.message["tool_calls"][0]["id"] == "call00000"

    d = desk([text + "<|im_end|>", CALL], main)
    assert not d.branches and len(d.check()) == 1 and d.session.counts["tool_errors"] == 1


@pytest.mark.failure(21, "arguments that are not a JSON object")
def test_arguments_of_the_client_that_are_no_object_are_rendered_or_refused(desk):
    def broken(arguments):
        return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": arguments}}]}

    async def main(d):
        assert (await d.chat("sum", broken("{bad"), {**RESULT, "tool_call_id": "c"}, tools=C.TOOLS)).status == 200
        reply = await d.chat("sum", {"role": "assistant", "tool_calls": [{"id": "c"}]}, "x")
        assert (
            reply.status == 400
            and "tool_calls[0] must be an object with id and function" in reply.body["error"]["message"]
        )

    d = desk(["3<|im_end|>"], main)
    assert "{bad" in d.tokenizer.decode(d.requests[0][0])


@pytest.mark.failure(22, "a cut or a stop inside reasoning")
def test_an_answer_that_was_cut_is_not_continued(desk):
    async def main(d):
        first = await d.chat("sum")
        assert first.body["choices"][0]["finish_reason"] == "length"
        assert first.message["reasoning_content"].startswith("hm") and first.message["content"] == ""
        await d.chat("sum", first.message, "more")

    d = desk(["<think>\nhm...", "4<|im_end|>"], main, template=C.STRIPS)
    assert d.branches == {"length": 1} and len(d.check()) == 2


@pytest.mark.failure(22, "a cut or a stop inside reasoning")
def test_a_stop_inside_of_the_reasoning(desk):
    async def main(d):
        first = await d.chat("sum")
        assert first.message["reasoning_content"] == "hm"
        await d.chat("sum", first.message, "more")

    d = desk(["<think>\nhm<|im_end|>", "4<|im_end|>"], main, template=C.STRIPS)
    assert d.branches == {"reasoning": 1} and len(d.check()) == 2


@pytest.mark.failure(23, "calls in flight at the end")
def test_requests_in_flight_at_the_end(desk):
    async def main(d):
        await d.chat("sum")
        late = asyncio.ensure_future(d.chat("other"))
        await asyncio.sleep(0.01)
        await d.close()
        assert (await late).status == 410
        reply = await d.chat("sum")
        assert (
            reply.status == 410
            and "has ended" in reply.body["error"]["message"]
            and reply.headers["x-should-retry"] == "false"
        )

    d = desk(["3<|im_end|>", (asyncio.Event(), "4<|im_end|>")], main)
    assert len(d.check()) == 1 and d.session.counts["cancelled"] == 1 and d.session.ask.abandoned


@pytest.mark.failure(24, "streamed tool-call deltas")
def test_streamed_calls_are_complete(desk):
    async def main(d):
        reply = await d.chat("sum", tools=C.TOOLS, stream=True, stream_options={"include_usage": True})
        assert reply.raw.endswith(b"data: [DONE]\n\n") and reply.headers["content-type"] == "text/event-stream"
        deltas = [choice["delta"] for event in reply.events for choice in event["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [c["index"] for c in calls] == [0, 1] and reply.events[-1]["usage"]["completion_tokens"] == len(
            d.encode(two)
        )
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{k: c[k] for k in ("id", "type", "function")} for c in calls],
        }
        results = [{**RESULT, "tool_call_id": c["id"]} for c in calls]
        await d.chat("sum", message, *results, tools=C.TOOLS)

    two = CALL.replace("<|im_end|>", "\n" + CALL)
    d = desk([two, "3<|im_end|>"], main)
    assert not d.branches and len(d.check()) == 1 and d.session.counts["tool_calls"] == 2


@pytest.mark.failure(25, "an agent that repairs its own calls")
def test_an_agent_that_repairs_a_call(desk):
    async def main(d):
        first = await d.chat("sum", tools=C.TOOLS)
        message = json.loads(json.dumps(first.message))
        message["tool_calls"][0]["function"]["name"] = "subtract"
        second = await d.chat("sum", message, RESULT, tools=C.TOOLS)
        await d.chat("sum", message, RESULT, second.message, "more", tools=C.TOOLS)

    d = desk([CALL, "3<|im_end|>", "4<|im_end|>"], main)
    assert d.branches == {"edited": 1} and len(d.check()) == 2
    assert d.transcript.turns[2].parent is d.transcript.turns[1]


def test_a_response_without_all_log_probs_ends_the_sample(desk):
    async def main(d):
        reply = await d.chat("sum")
        assert reply.status == 503
        with pytest.raises(Exception, match="returned 1 log-probabilities for 2 tokens"):
            await d.session.failure

    desk([Response([1, 2], [-0.1], "stop")], main)
