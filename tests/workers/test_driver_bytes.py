"""How many bytes per sample the driver sends and receives with rollout workers: a count, which does not depend on the machine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from miles_core.data.sample import Sample, Status
from miles_core.train.data_shard import merge_recorded, split_by_replica
from miles_tools.samples.writers import make_entries
from miles_workers.local_channel import Message
from miles_workers.object_ref import ObjectRef
from miles_workers.remote_sample import heads, pack_samples, refer
from miles_workers.remote_tokens import pack_tokens, refer_tokens
from miles_workers.rollout_worker import GroupOrder, Letters, News
from miles_workers.sample_list import pack_shard

ROOT = Path(__file__).parents[2]
#: Issue 30: the driver handles less than this per sample.
MOST = 50
SIZE = 8


def make_group(number: int, length: int) -> list[Sample]:
    """A group with rewards between 0 and 1 that float16 does not hold, as a reward model returns."""
    random = np.random.default_rng(number)
    return [
        Sample(
            prompt="a question " * 50,
            tokens=[7] * (600 + length),
            response="a" * length,
            response_length=length - int(random.integers(0, 9)),
            label={"answer": 12},
            reward=float(random.uniform()),
            status=Status.COMPLETED if random.integers(2) else Status.TRUNCATED,
            metadata={"id": "x" * 100},
            rollout_log_probs=[-1.0] * length,
            weight_versions=[(0, 3)],
            group_index=number,
            index=number * SIZE + position,
            rollout_id=number * SIZE + position,
            policy="policy",
        )
        for position in range(SIZE)
    ]


def size(value: object) -> int:
    """Bytes of a message, with the objects that this process wrote."""
    message = Message(value)
    own = [buffer for ref in message.refs if ref.descriptor is None for buffer in ref.buffers]
    return len(message.data) + sum(buffer.nbytes for buffer in (*message.buffers, *own))


def messages(groups: list[list[Sample]], at_once: int, options: object) -> dict[str, int]:
    """Bytes of everything that the driver sends and receives for these groups; ``at_once`` groups share a message between driver and
    rollout worker."""
    found = {"to_workers": 0, "from_workers": 0}
    samples: list[Sample] = []
    for start in range(0, len(groups), at_once):
        some = groups[start : start + at_once]
        orders = {
            start + n: GroupOrder(9_000_000 - 7919 * (start + n), range(g[0].index, g[0].index + SIZE), False)
            for n, g in enumerate(some)
        }
        found["to_workers"] += size(
            (123_456, "post", (Letters(2, {} if start else {"policy": (2, 2)}, orders).pack(),))
        )
        refs = [pack_samples(group) for group in some]
        for ref in refs:
            ref.share()  # the worker writes them
        sent = [heads(group) for group in some]
        news = News(groups={start + n: ((head, n), None) for n, head in enumerate(sent)})
        news.answers = {"engine/queue": (1.5, 8.0)}
        found["from_workers"] += size((123_456, (news.pack(), refs), None))
        for head, ref in zip(sent, refs, strict=True):
            samples += refer(head, ref)
    shares = split_by_replica(samples, options, 2)
    found["to_ranks"] = sum(size((1, "learn", (pack_shard(share), 3))) for share in shares)
    recorded = []
    for share in shares:
        ref: ObjectRef = pack_tokens([Recorded() for _ in share.samples])
        ref.share()
        recorded.append(refer_tokens(len(share.samples), ref))
    seen = merge_recorded(shares, recorded)
    entries = asyncio.run(make_entries(1, [(sample, one, "") for sample, one in zip(samples, seen, strict=True)]))
    found["to_savers"] = size(("rollouts/train/00000001.part", 1, [entry for entry, _ in entries], ()))
    return found


class Recorded:
    log_probs = advantages = np.zeros(2000, np.float32)


@pytest.fixture
def options():
    return SimpleNamespace(global_batch_size=None, num_steps_per_rollout=2)


@pytest.mark.parametrize("at_once", [1, 32])
def test_the_driver_handles_less_than_50_bytes_per_sample(options, at_once):
    """Also if every group has a message of its own."""
    found = messages([make_group(number, 2000) for number in range(64)], at_once, options)
    per_sample = {name: count / (64 * SIZE) for name, count in found.items()}
    assert sum(per_sample.values()) < MOST, per_sample
    assert per_sample["to_ranks"] < 4 and per_sample["to_savers"] < 6, per_sample


def test_the_bytes_do_not_grow_with_prompts_and_responses(options):
    counts = [messages([make_group(number, length) for number in range(16)], 16, options) for length in (2000, 4000)]
    assert abs(sum(counts[0].values()) - sum(counts[1].values())) < 16


def test_prompts_that_the_driver_sends_are_counted():
    """The control: a reference with pending samples that the driver wrote."""
    order = GroupOrder(pack_samples(make_group(0, 2000)), range(SIZE), False)
    assert size((1, "post", (Letters(2, {}, {0: order}).pack(),))) > SIZE * 2000 * 4


@pytest.mark.thorough
@pytest.mark.parametrize("routes", [0, 48])
def test_a_run_with_two_workers_handles_less_than_50_bytes_per_sample(routes):
    """Everything that passes through the sockets of a whole run with real processes, two ranks, and saved samples."""
    from benchmarks.scale.rollout_workers import measure

    found = measure(2, 32, 256, routes, 0.0)["driver_bytes_per_sample"]
    assert {"to_workers", "from_workers", "to_ranks", "to_savers"} <= found.keys()
    assert sum(found.values()) < MOST, json.dumps(found)
