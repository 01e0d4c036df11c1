"""What ``--record-steps`` costs: seconds per step, as a share of the step, and bytes per token.

    python -m benchmarks.project.record_steps --models toy qwen3-30m --pairs 3 --threads 1 --save

Runs with and without recording take turns. The parts of recording are timed separately: checksums of gradients and weights, checksums in
the engine, and writing the samples, which a thread does while the run continues. ``share`` is the sum of these parts divided by the time of
a step of the same runs; ``ratio`` is the time of a step with recording divided by the time without, as the median over pairs. Without a GPU,
times are processor time of one thread, which other programs change little. On a GPU they are elapsed time, and each part waits for the
device.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import finish, installed, options
from miles_core.observe.metrics import MetricLog
from miles_testing import toy_run
from miles_tools.replay import recorder, steps, sums

#: Options of ``toy_run`` by name: the test kit's model, and random models with long responses.
MODELS: dict[str, dict[str, Any]] = {
    "toy": {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "rollout_max_response_len": 16, "steps": 12},
    "qwen3-14m": {
        "family": "qwen3",
        "sizes": {
            "hidden_size": 384,
            "intermediate_size": 1152,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 64,
        },
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": 256,
        "steps": 4,
    },
    "qwen3-30m": {
        "family": "qwen3",
        "sizes": {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": 128,
        "steps": 3,
    },
    "qwen3-0.6b": {
        "family": "qwen3",
        "sizes": {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 4096,
        },
        "dtype": "bfloat16",
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": 1024,
        "steps": 7,
    },
}


@contextmanager
def timed(parts: dict[str, float]) -> Iterator[None]:
    """Add the seconds of each part of the recording to ``parts``."""

    def clock(name: str, function: Callable[..., Any], now: Callable[[], float] = part_time) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            wait()
            started = now()
            try:
                return function(*arguments, **named)
            finally:
                wait()
                parts[name] = parts.get(name, 0.0) + now() - started

        return wrapped

    async def check(self: Any, names: Any) -> Any:
        wait()
        started = part_time()
        found = await plain(self, names)
        parts["engine"] = parts.get("engine", 0.0) + part_time() - started
        return found

    from miles_embedded.engine.engine import EmbeddedEngine

    plain = EmbeddedEngine.weight_checksums
    watch = sums._Watch
    with (
        patch.object(EmbeddedEngine, "weight_checksums", check),
        patch.object(watch, "_before", clock("before the optimizer", watch._before)),
        patch.object(watch, "_after", clock("after the optimizer", watch._after)),
        patch.object(watch, "read", clock("read", watch.read)),
        patch.object(sums, "write_sums", clock("files of checksums", steps.write_sums)),
        patch.object(recorder, "write_samples", clock("samples (thread)", steps.write_samples)),
    ):
        yield


def part_time() -> float:
    """Return the time of a part of the recording in seconds."""
    return time.perf_counter() if torch.cuda.is_available() else time.thread_time()


def step_time() -> float:
    """Return the time of steps in seconds."""
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


@contextmanager
def stamped(ends: list[float]) -> Iterator[None]:
    """Append the time at the end of each step to ``ends``."""
    append = MetricLog.append

    def stamp(self: MetricLog, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        ends.append(step_time())
        return append(self, step, metrics)

    with patch.object(MetricLog, "append", stamp):
        yield


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(flags: Mapping[str, Any], pairs: int) -> dict[str, Any]:
    """Make pairs of runs, and return the medians."""
    parts: dict[str, float] = {}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    recorded = tokens = size = parameters = 0
    for number in range(pairs):
        for records in (False, True) if number % 2 == 0 else (True, False):
            ends: list[float] = []
            with (
                tempfile.TemporaryDirectory() as folder,
                stamped(ends),
                timed(parts) if records else nullcontext(),
            ):
                print(f"pair {number + 1} of {pairs}, record_steps {records}", file=sys.stderr, flush=True)
                run = toy_run(directory=Path(folder) / "run", record_steps=records or None, lr=1e-6, **flags)
                seconds[records].append(statistics.median(b - a for a, b in pairwise(ends)))
                if records:
                    recorded += len(run.metrics)
                    tokens += sum(len(sample["tokens"]) for sample in run.samples)
                    size += sum(
                        file.stat().st_size
                        for path in steps.step_directories(run.directory).values()
                        for file in (*path.glob("samples.*"), *path.glob("trained.*"))
                    )
                    parameters = sum(p.numel() for p in run.trainer.model.parameters())
    step = statistics.median(seconds[True])
    ratios = [with_it / without for without, with_it in zip(seconds[False], seconds[True], strict=True)]
    return {
        "parameters": parameters,
        "tokens_per_step": tokens // recorded,
        "step_seconds": round(step, 4),
        "recording_seconds": round(sum(parts.values()) / recorded, 5),
        "share": round(sum(parts.values()) / recorded / step, 4),
        "parts": {name: round(value / recorded, 5) for name, value in parts.items()},
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "bytes_per_token": round(size / tokens, 1),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["toy", "qwen3-30m"])
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = {}
    for name in given.models:
        result[name] = measure(MODELS[name], given.pairs)
        print(name, result[name], file=sys.stderr, flush=True)
    finish("record_steps", result, given.save, lambda: installed("miles-core", "torch"), device)


if __name__ == "__main__":
    main()
