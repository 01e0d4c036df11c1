"""Microseconds of processor time that ``miles train`` spends per sample around engine and trainer: driver, rollout function, hooks, reward, checks.

The engine returns prepared responses at once and the trainer learns nothing, so a step consists of Python. A step is 32 prompts x 8 samples of
64 + 256 tokens by default; the reward counts odd tokens with numpy. Reported is the time of the main thread from the start of a step until
learning. ``--profile`` prints cProfile's tables of functions on standard error. The last line is one JSON object.

    python benchmarks/scale/sample_cost.py --profile
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.checkpoints import VOCABULARY, make_model
from benchmarks.measure import finish, installed, options

PROMPT, SAMPLES = 64, 8
#: Steps that are not counted.
WARM_UP = 2
REWARD = """
import numpy as np
async def rm(args, sample):
    return float((np.asarray(sample.tokens)[-64:] % 2).mean())
"""


def main() -> None:
    parser = options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=10, help="counted steps")
    parser.add_argument("--plugins", default="", help="plugins of the run")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        seconds = measure(given, Path(directory))
    each = [1e6 * s / (given.prompts * SAMPLES) for s in seconds[WARM_UP:]]
    found = {"microseconds": round(statistics.median(each), 1), "range": [round(min(each), 1), round(max(each), 1)]}
    finish("sample_cost", found, given.save, lambda: installed("torch"))


def measure(given: argparse.Namespace, directory: Path) -> list[float]:
    """Run ``miles train``; return the processor seconds of each step's rollout."""
    from miles_core import loop
    from miles_core.cli import train

    original: Any = loop.step
    meter = Meter(cProfile.Profile(time.process_time) if given.profile else None)
    replace_parts(given, meter)

    async def step(run: Any, *parts: Any) -> None:
        meter.start()
        await original(run, *parts)

    loop.step = step  # type: ignore[assignment]
    flags = f"""--hf-checkpoint {make_model("tiny_dense", directory / "model")} --save {directory / "run"} --device cpu --seed 0
        --rollout-batch-size {given.prompts} --n-samples-per-prompt {SAMPLES} --rollout-max-response-len {given.tokens} --lr 1e-6
        --num-rollout {given.steps + WARM_UP} --log-level error --no-self-check --allow-mismatch"""
    plugins = ["--plugins", *given.plugins.split()] if given.plugins else []
    train.run([*flags.split(), *write_inputs(directory, given.prompts * (given.steps + WARM_UP)), *plugins])
    if meter.profiler is not None:
        pstats.Stats(meter.profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40)
        pstats.Stats(meter.profiler, stream=sys.stderr).sort_stats("cumtime").print_stats(110)
    return meter.seconds


def write_inputs(directory: Path, prompts: int) -> list[str]:
    """Write prompts of random words and a reward; return their flags."""
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(2, VOCABULARY)}" for _ in range(PROMPT)) for _ in range(prompts)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (directory / "reward.py").write_text(REWARD)
    flags = (
        f"--prompt-data {directory / 'prompts.jsonl'} --input-key prompt --custom-rm-path {directory / 'reward.py'}:rm"
    )
    return flags.split()


class Meter:
    """Measures from ``start`` to ``stop``, with a profiler if there is one."""

    def __init__(self, profiler: cProfile.Profile | None) -> None:
        self.profiler, self.seconds, self._started = profiler, list[float](), 0.0

    def start(self) -> None:
        self._started = time.thread_time()
        if self.profiler is not None and len(self.seconds) >= WARM_UP:
            self.profiler.enable()

    def stop(self) -> None:
        self.seconds.append(time.thread_time() - self._started)
        if self.profiler is not None:
            self.profiler.disable()


def replace_parts(given: argparse.Namespace, meter: Meter) -> None:
    """Replace generation and training by functions that compute nothing."""
    from miles_core.data.column import FLOATS, TOKENS, Column
    from miles_core.engine import Request, Response
    from miles_core.train.local_learner import LocalLearner
    from miles_core.trainer import Learned
    from miles_embedded.engine.engine import EmbeddedEngine

    draw = np.random.default_rng(0)
    tokens = Column.of(draw.integers(2, 250, given.tokens), TOKENS)
    log_probs = Column.of(-draw.random(given.tokens), FLOATS)
    text = "w2 " * given.tokens

    async def generate(self: Any, request: Request) -> Response:
        return Response(tokens[:], log_probs[:], "length", text, [(0, self.version)])

    async def learn(self: Any, samples: Any, step: int) -> Learned:
        meter.stop()
        return self.record_learned(Learned({}, 1), step)  # type: ignore[no-any-return]

    EmbeddedEngine.generate = generate  # type: ignore[method-assign]
    LocalLearner.learn = learn  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
