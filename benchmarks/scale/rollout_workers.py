"""What ``--rollout-workers`` takes off the driver, and what it adds.

The real loop with an engine and a trainer that cost nothing (``driver_double.py``), in the driver alone and with one and two workers: the
processor time of the driver per token, and the time of a step. ``reward`` is the processor time of scoring one sample in Python, which
workers do in parallel. Samples are saved; ``routes`` is the number of layers with a routing record. Run:
``python benchmarks/scale/rollout_workers.py --save`` (three minutes).

``--bytes`` counts the bytes per sample that the driver sends and receives instead, for several shapes of a step (one minute). Messages count in
full, with arrays and shared memory that the driver writes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.measure import finish, installed, options
from miles_core import loop
from miles_core.cli.main import main as run_command
from miles_core.train.data_shard import DataShard
from miles_testing.toy import toy_arguments
from miles_workers import local_channel, local_process, object_reader

STEPS = 3
#: For ``--bytes``: groups of a step, samples of a group, tokens of a response, tokens of a prompt, layers with a routing record.
SHAPES = (
    (32, 8, 256, 10, 0),
    (32, 8, 256, 100, 0),
    (32, 8, 2048, 100, 48),
    (128, 8, 256, 100, 0),
    (32, 16, 256, 100, 0),
    (128, 2, 256, 100, 0),
)

#: Uses the processor for some milliseconds, as a verifier does, and cannot run in parallel with other Python code of its process.
REWARD = """
import time

async def reward(args, sample):
    end = time.thread_time() + {milliseconds} / 1000
    while time.thread_time() < end:
        pass
    return float(sample.index % 2)
"""


class Traffic:
    """Counts the bytes of messages between the driver and other processes of this machine, by kind."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count in this context. Memory that travels as a descriptor counts where the message is its only holder, and where the driver
        wrote it."""
        sent, received, mapped = local_channel.Message, local_channel._read, local_channel.split_buffers

        class Counted(sent):  # type: ignore[misc, valid-type]
            def __init__(message, value: Any) -> None:
                super().__init__(value)
                own = [ref for ref in message.refs if ref.descriptor is None]  # not received from another process
                buffers = [*message.buffers, *(buffer for ref in own for buffer in ref.buffers)]
                size = len(message.data) + sum(buffer.nbytes for buffer in buffers)
                self.bytes[_kind(value)] += size

        def read(connection: Any, size: int) -> Any:
            self.bytes["from_workers"] += size
            return received(connection, size)

        def split(descriptor: int, sizes: Any, whole: bool = True) -> Any:
            self.bytes["from_workers"] += sum(sizes)
            return mapped(descriptor, sizes, whole)

        with patch.multiple(local_channel, Message=Counted, _read=read, split_buffers=split), ExitStack() as stack:
            for module in (local_process, object_reader):
                stack.enter_context(patch.object(module, "Message", Counted))
            yield


def _kind(value: Any) -> str:
    if isinstance(value, DataShard):
        return "to_ranks"
    return "to_workers" if isinstance(value, tuple) and isinstance(value[0], int) else "to_savers"


def write_prompts(path: Path, tokens: int) -> Path:
    """Write 256 different prompts of ``tokens`` tokens each."""
    letters = "abcdefghijklmnop"
    rows = [json.dumps({"input": a + b + "a" * (tokens - 2), "label": "a"}) for a in letters for b in letters]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def measure(
    workers: int | None, groups: int, length: int, routes: int, milliseconds: float, size: int = 8, prompt: int = 100
) -> dict[str, Any]:
    """Run three steps; return the time of the last one, the driver's processor time in it, and the bytes that it sent and received in all
    of them, with the files of samples.

    Args:
        workers: number of rollout workers; None for the driver alone.
        groups: groups of a step.
        length: tokens of a response.
        routes: layers with a routing record.
        milliseconds: processor time of a reward.
        size: samples of a group.
        prompt: tokens of a prompt.
    """
    found: dict[str, Any] = {}
    plain, traffic, tokens = loop.step, Traffic(), groups * size * length

    async def step(run: Any, *rest: Any) -> None:
        processor, wall = time.process_time(), time.perf_counter()
        if not found:  # the first step: workers are built
            traffic.bytes.clear()
        await plain(run, *rest)
        found["step_seconds"] = round(time.perf_counter() - wall, 3)
        found["driver_microseconds_per_token"] = round((time.process_time() - processor) / tokens * 1e6, 3)

    os.environ |= {"DRIVER_TOKENS": str(length), "DRIVER_ROUTES": str(routes)}
    with tempfile.TemporaryDirectory() as temporary:
        reward = Path(temporary) / "reward.py"
        reward.write_text(REWARD.format(milliseconds=milliseconds))
        words = toy_arguments(
            [str(Path(__file__).with_name("driver_double.py"))],
            directory=Path(temporary) / "run",
            steps=STEPS,
            runtime="driver_double",
            rollout_workers=workers,
            rollout_batch_size=groups,
            n_samples_per_prompt=size,
            prompt_data=write_prompts(Path(temporary) / "prompts.jsonl", prompt),
            rollout_max_response_len=length,
            custom_rm_path=reward,
            save_rollouts_size=1 << 40,
        )
        with patch.object(loop, "step", step), traffic.count():
            status = run_command(["train", *words])
        if status:
            raise SystemExit(status)
    samples = STEPS * groups * size
    return {"driver_bytes_per_sample": {k: round(n / samples, 1) for k, n in sorted(traffic.bytes.items())}, **found}


def count_bytes() -> list[dict[str, Any]]:
    """Return the driver's bytes per sample for each of ``SHAPES``, with two workers."""
    rows: list[dict[str, Any]] = []
    for groups, size, length, prompt, routes in SHAPES:
        found = measure(2, groups, length, routes, 0.0, size, prompt)["driver_bytes_per_sample"]
        case = {"groups": groups, "samples": size, "response_tokens": length, "prompt_tokens": prompt, "routes": routes}
        rows.append({**case, **found, "total": round(sum(found.values()), 1)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--bytes", action="store_true", help="count the driver's bytes per sample instead")
    parser.add_argument("--groups", type=int, default=32, help="groups of a step, of eight samples")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a response")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    if chosen.bytes:
        finish("driver_bytes", {"rows": count_bytes()}, chosen.save, lambda: installed("torch"))
        return
    rows: list[dict[str, Any]] = []
    for routes, milliseconds in ((0, 0.0), (0, 10.0), (48, 0.0), (48, 10.0)):
        for workers in (None, 1, 2):
            found = measure(workers, chosen.groups, chosen.length, routes, milliseconds)
            rows.append({"routes": routes, "reward_milliseconds": milliseconds, "workers": workers or 0, **found})
            print(rows[-1], file=sys.stderr, flush=True)
    result = {"groups": chosen.groups, "length": chosen.length, "rows": rows}
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
