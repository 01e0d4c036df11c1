"""The queue, the conversion of data, and the wire format, each alone."""

import asyncio
import struct

import numpy as np
import pytest

from miles_core.plugin import DataError
from miles_service.datums import make_batch
from miles_service.queue import FairQueue, Job
from miles_service.testing import forward_backward
from miles_service.wire import decode, decode_request, encode_gradients
from miles_tools.http_server import ApiError

EMPTY = ([5, 6], {"target_tokens": [6, 7]})


def ran(jobs, most=2):
    """Run (client, kind, seconds) in a queue; return the order of starts and ends."""
    events = []

    async def main():
        queue = FairQueue(most)
        made = []
        for number, (client, alone, seconds) in enumerate(jobs):

            async def work(name=f"{client}{number}", seconds=seconds):
                events.append(f"{name} starts")
                await asyncio.sleep(seconds)
                events.append(f"{name} ends")
                return name

            made.append(Job(str(number), client, work, alone, b""))
            queue.put(made[-1])
        running = asyncio.ensure_future(queue.run())
        results = await asyncio.gather(*(asyncio.wrap_future(job.result) for job in made))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return results

    return asyncio.run(main()), events


def test_clients_take_turns_and_keep_their_order():
    jobs = [("a", True, 0)] * 3 + [("b", True, 0)] * 2 + [("c", True, 0)]
    _, events = ran(jobs)
    assert [event[:2] for event in events if event.endswith("starts")] == ["a0", "b3", "c5", "a1", "b4", "a2"]
    assert all(end == f"{start[:2]} ends" for start, end in zip(events[::2], events[1::2], strict=True))


def test_samples_run_together_up_to_a_limit_and_training_passes_them():
    jobs = [("a", False, 0.05)] * 4 + [("b", True, 0)]
    _, events = ran(jobs)
    assert events.index("b4 ends") < events.index("a0 ends") < events.index("a2 starts")
    assert events.index("a1 starts") < events.index("a0 ends")


def test_prompts_that_are_not_trained_are_shared_by_responses():
    inputs = {"logprobs": [0, 0, -1, 0], "advantages": [0, 0, 0, 2.0]}
    data = [
        (
            np.array([5, 6, 7, 8]),
            {"target_tokens": np.array([0, 0, 8, 9]), **{n: np.array(v) for n, v in inputs.items()}},
        ),
        (
            np.array([5, 6, 7, 1]),
            {"target_tokens": np.array([0, 0, 1, 2]), **{n: np.array(v) for n, v in inputs.items()}},
        ),
    ]
    batch = make_batch(data, "ppo")
    one, other = batch.samples
    assert list(one.tokens) == [5, 6, 7, 8, 9] and one.response_length == 2 and list(one.loss_mask) == [1, 1]
    assert one.group_index == other.group_index == 0
    np.testing.assert_array_equal(one.fields["advantages"], [0, 2])
    aligned = batch.align([np.array([-1.0, -2.0], np.float32)] * 2)
    np.testing.assert_array_equal(aligned[0], [0, 0, -1, -2])


def test_a_penalty_reaches_every_next_token():
    inputs = {"logprobs": np.zeros(3), "advantages": np.array([0, 0, 1.0])}
    (sample,) = make_batch([(np.array([5, 6, 7]), {"target_tokens": np.array([6, 9, 8]), **inputs})], "dro").samples
    assert list(sample.loss_mask) == [1, 0, 1]  # the second target is not the next token
    with pytest.raises(DataError, match=r"target_tokens\[1\] is 9, and the next token of model_input is 7"):
        inputs["advantages"] = np.array([0, 1.0, 1.0])
        make_batch([(np.array([5, 6, 7]), {"target_tokens": np.array([6, 9, 8]), **inputs})], "dro")


def test_requests_are_decoded():
    found = decode_request(
        forward_backward("m", 7, [EMPTY, EMPTY], "ppo", {"clip_low_threshold": 0.5}, forward_only=True)
    )
    assert found["model_id"] == "m" and found["seq_id"] == 7 and found["loss_fn"] == "ppo" and found["forward_only"]
    assert found["settings"] == {"clip_low_threshold": 0.5} and len(found["data"]) == 2
    tokens, inputs = found["data"][1]
    assert tokens.tolist() == [5, 6] and inputs["target_tokens"].tolist() == [6, 7]
    assert inputs["target_tokens"].dtype == np.int64


def test_fields_of_later_versions_are_skipped_and_cut_off_requests_refused():
    data = forward_backward("m", 1, [EMPTY], "ppo")
    assert decode_request(data + bytes([15 << 3 | 2, 2]) + b"xy" + bytes([9 << 3 | 5]) + b"1234")["loss_fn"] == "ppo"
    refused = 0
    for cut in range(1, len(data)):
        try:
            assert not decode_request(data[:cut])["data"]  # cut between two fields
        except ApiError as error:
            assert error.status == 400
            refused += 1
    assert refused > 0.9 * len(data) - 10


def test_results_are_what_the_client_reads():
    arrays = [np.array([1, 2], np.float32), np.array([3], np.float32)]
    message = {
        "output": {1: ("type", "string"), 2: ("records", "[record]"), 3: ("metrics", "[metric]")},
        "record": {2: ("fields", "[field]"), 3: ("count", "int")},
        "field": {1: ("key", "string"), 2: ("value", "batched")},
        "batched": {1: ("data", "bytes"), 2: ("offsets", "bytes"), 3: ("dtype", "int")},
        "metric": {1: ("key", "string"), 2: ("value", "bytes")},
    }
    found = decode(memoryview(encode_gradients(arrays, {"loss:sum": 1.5})), "output", message)
    (record,) = found["records"]
    batched = record["fields"][0]["value"]
    assert record["count"] == 2 and batched["dtype"] == 1
    np.testing.assert_array_equal(np.frombuffer(batched["data"], "<f4"), [1, 2, 3])
    np.testing.assert_array_equal(np.frombuffer(batched["offsets"], "<i8"), [0, 8, 12])
    assert struct.unpack("<d", found["metrics"][0]["value"])[0] == 1.5
