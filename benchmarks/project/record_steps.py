"""What ``--record-steps`` costs: seconds per step and as a share of it, and bytes per token.

A run of a random Qwen3 model (``--hidden``, ``--layers``) with long responses. The recording is timed where it happens: checksums of
gradients and weights, checksums in the engine, and writing the samples, which a thread does while the run continues; on a GPU each part waits
for the device. The sum is divided by the time of a whole step, so other work on the machine affects both alike. A run without recording has
the median step time for comparison.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import finish, installed, options
from miles_testing import toy_run
from miles_tools.replay import recorder, steps, sums


@contextmanager
def timed(parts: dict[str, float]) -> Iterator[None]:
    """Add the seconds of each part of the recording to ``parts``."""

    def clock(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            wait()
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                wait()
                parts[name] = parts.get(name, 0.0) + time.perf_counter() - started

        return wrapped

    async def check(self: Any, names: Any) -> Any:
        wait()
        started = time.perf_counter()
        found = await plain(self, names)
        parts["engine"] = parts.get("engine", 0.0) + time.perf_counter() - started
        return found

    from miles_embedded.engine.engine import EmbeddedEngine

    plain = EmbeddedEngine.weight_checksums
    watch = sums._Watch
    with (
        patch.object(EmbeddedEngine, "weight_checksums", check),
        patch.object(watch, "_before", clock("before the optimizer", watch._before)),
        patch.object(watch, "_after", clock("after the optimizer", watch._after)),
        patch.object(watch, "read", clock("read", watch.read)),
        patch.object(sums, "write_json", clock("files of checksums", sums.write_json)),
        patch.object(recorder, "write_samples", clock("samples (thread)", steps.write_samples)),
    ):
        yield


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step, with 8 responses each")
    parser.add_argument("--length", type=int, default=128, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sizes = {
        "hidden_size": given.hidden,
        "num_hidden_layers": given.layers,
        "intermediate_size": 3 * given.hidden,
        "num_attention_heads": given.hidden // 64,
        "num_key_value_heads": given.hidden // 128,
        "head_dim": 64,
    }
    flags: dict[str, Any] = {
        "steps": given.steps,
        "family": "qwen3",
        "sizes": sizes,
        "rollout_batch_size": given.prompts,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": given.length,
        "lr": 1e-6,
    }
    parts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        without = toy_run(directory=Path(folder) / "without", **flags)
        with timed(parts):
            run = toy_run(directory=Path(folder) / "with", record_steps=True, **flags)
        tokens = sum(len(sample["tokens"]) for sample in run.samples)
        files = [file for path in steps.step_directories(run.directory).values() for file in path.iterdir()]
        size = sum(file.stat().st_size for file in files if file.name.startswith(("samples.", "trained.")))
        parameters = sum(p.numel() for p in run.trainer.model.parameters())
    seconds = [record["time/step"] for record in run.metrics if record["step"] > 1]
    recording = sum(parts.values()) / given.steps
    result = {
        "parameters": parameters,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "tokens_per_step": tokens // given.steps,
        "step_seconds": round(statistics.median(seconds), 4),
        "step_seconds_without": round(
            statistics.median(record["time/step"] for record in without.metrics if record["step"] > 1), 4
        ),
        "recording_seconds": round(recording, 5),
        "share": round(recording / statistics.median(seconds), 4),
        "parts": {name: round(value / given.steps, 5) for name, value in parts.items()},
        "bytes_per_token": round(size / tokens, 1),
    }
    print(result, file=sys.stderr)
    finish("record_steps", result, given.save, lambda: installed("miles-core", "torch"), result["device"])


if __name__ == "__main__":
    main()
