"""Microseconds of processor time that a step of ``miles train`` spends per sample around engine and trainer, by stage.

The engine answers at once with prepared tokens and the trainer's steps compute nothing, so a step consists of the driver's own work: prompts,
requests, checks of responses, transcript, reward, groups, batch, advantages, metrics and saving. A sample has 64 + 256 tokens in groups of 8;
the reward is ``exact``. A timer of the process's own time finds the stage of the innermost frame that belongs to one (``STAGES``);
``around_engine`` is the sum of all stages but ``engine`` (the prepared answers), ``sync``, ``saving`` and ``other threads``. ``--profile`` prints
cProfile's table on standard error instead. The last line is one JSON object.

    python benchmarks/training/sample_cost.py --samples 256 4096
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import pstats
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch

from benchmarks.engine.checkpoints import VOCABULARY, make_model
from benchmarks.measure import ROOT, finish, installed, options

PROMPT, RESPONSE, GROUP, WARM_UP = 64, 256, 8, 2
#: Stage -> files and folders of its functions. Others, such as ``data/sample.py``, belong to the stage of their caller.
STAGES = {
    "engine": ["benchmarks/"],
    "prompts": [
        "miles_core/rollout/queue.py",
        "miles_core/data/prompts.py",
        "miles_core/data/prompt_file.py",
        "miles_core/data/tokenizer.py",
    ],
    "requests": [
        "miles_core/rollout/generate.py",
        "miles_core/rollout/requests.py",
    ],
    "checks": ["miles_core/contracts/engine.py"],
    "hooks": ["miles_core/plugin/", "miles_core/contracts/boundaries.py"],
    "transcript": ["miles_core/rollout/transcript.py"],
    "reward": ["miles_core/reward/"],
    "groups": ["miles_core/rollout/collect.py", "miles_core/schedule/", "miles_core/run/"],
    "batch": ["miles_core/data/batch.py", "miles_core/train/data_shard.py"],
    "sync": ["miles_core/sync/", "miles_core/train/rank.py", "miles_formats/", "miles_embedded/"],
    "advantages": ["miles_core/train/", "miles_core/algorithm/"],
    "metrics": ["miles_core/observe/", "rollout_metrics"],
    "saving": ["miles_tools/samples/"],
    "loop": ["miles_core/loop.py", "asyncio/"],
}
NOT_AROUND = ("engine", "sync", "saving", "other threads")


def main() -> None:
    parser = options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--samples", type=int, nargs="+", default=[256, 4096], help="samples per step")
    parser.add_argument("--seconds", type=float, default=6, help="processor time to measure for each size")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        model = make_model("tiny_dense", Path(directory) / "model")
        for samples in given.samples:
            found[str(samples)] = measure(samples, given, model, Path(directory) / str(samples))
    finish("sample_cost", {"samples": found}, given.save, lambda: installed("torch"))


def measure(samples: int, given: argparse.Namespace, model: Path, directory: Path) -> dict[str, Any]:
    """Run ``miles train``; return the microseconds per sample."""
    from miles_core import loop
    from miles_core.cli import train

    original, steps = loop.step, max(4, round(given.seconds / (samples * 1e-4)))
    meter, seconds = Meter(cProfile.Profile(time.process_time) if given.profile else None), list[float]()

    async def step(run: Any, *parts: Any) -> None:
        with meter if len(seconds) >= WARM_UP else nullcontext():
            started = time.process_time()
            await original(run, *parts)
            seconds.append(time.process_time() - started)

    loop.step = step  # type: ignore[assignment]
    replace_parts()
    flags = f"""--hf-checkpoint {model} --save {directory / "run"} --device cpu --seed 0 --rm-type exact --label-key label
        --rollout-batch-size {samples // GROUP} --n-samples-per-prompt {GROUP} --rollout-max-response-len {RESPONSE} --lr 1e-6
        --num-rollout {steps + WARM_UP} --log-level error --no-self-check --allow-mismatch --input-key prompt"""
    try:
        train.run([*flags.split(), "--prompt-data", str(write_prompts(directory, samples // GROUP))])
    finally:
        loop.step = original
        signal.setitimer(signal.ITIMER_PROF, 0)
    each = [1e6 * s / samples for s in seconds[WARM_UP:]]
    if meter.profiler is not None:
        pstats.Stats(meter.profiler, stream=sys.stderr).sort_stats("tottime").print_stats(60)
    stages = {
        name: round(statistics.fmean(each) * n / meter.stages.total(), 2) for name, n in meter.stages.most_common()
    }
    around = sum(stages.values()) - sum(stages.get(name, 0) for name in NOT_AROUND)
    return {
        "around_engine": round(around, 1),
        "whole_step": round(statistics.median(each), 1),
        "range": [round(min(each), 1), round(max(each), 1)],
        "stages": stages,
    }


def write_prompts(directory: Path, count: int) -> Path:
    """Write prompts of random words with labels."""
    draw, file = random.Random(0), directory / "prompts.jsonl"
    texts = [" ".join(f"w{draw.randrange(2, VOCABULARY)}" for _ in range(PROMPT)) for _ in range(count)]
    directory.mkdir()
    file.write_text("".join(json.dumps({"prompt": text, "label": "w7"}) + "\n" for text in texts))
    return file


class Meter:
    """Counts the stage of the main thread every few milliseconds of processor time, or profiles, while it is entered."""

    def __init__(self, profiler: cProfile.Profile | None) -> None:
        self.profiler, self.entered, self.stages = profiler, False, Counter[str]()
        if profiler is None:  # always running: the first interval would hide the begin of every step
            signal.signal(signal.SIGPROF, lambda _, frame: self._count(frame))
            signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)

    def __enter__(self) -> None:
        self.entered = True
        if self.profiler is not None:
            self.profiler.enable()

    def __exit__(self, *_: object) -> None:
        self.entered = False
        if self.profiler is not None:
            self.profiler.disable()

    def _count(self, frame: Any) -> None:
        if self.entered:
            self.stages[find_stage(frame)] += 1


def find_stage(frame: Any) -> str:
    """Return the stage of the innermost frame that belongs to one."""
    if frame.f_code.co_name == "select":
        return "other threads"
    while frame is not None:
        if stage := stage_of(frame.f_code):
            return stage
        frame = frame.f_back
    return "loop"


@functools.cache  # called every millisecond
def stage_of(code: CodeType) -> str:
    """Return the stage of a function; "" if it belongs to that of its caller."""
    place = code.co_filename.removeprefix(f"{ROOT}/") + ":" + code.co_name
    for stage, parts in STAGES.items() if "/site-packages/" not in place else ():
        if any(place.startswith(part) or f"/{part}" in place or place.endswith(f":{part}") for part in parts):
            return stage
    return ""


def replace_parts() -> None:
    """Replace generation and the trainer's steps by functions that compute nothing."""
    from miles_core.contracts.answer import Answer
    from miles_core.contracts.engine import Request, Response
    from miles_core.data.column import FLOATS, TOKENS, Column
    from miles_embedded.engine.engine import EmbeddedEngine
    from miles_embedded.trainer.trainer import EmbeddedTrainer

    draw = np.random.default_rng(0)
    tokens = Column.of(draw.integers(2, 250, RESPONSE), TOKENS)
    log_probs = Column.of(-draw.random(RESPONSE), FLOATS)
    text = "w2 " * RESPONSE

    def generate(self: Any, request: Request) -> Answer:
        answer = Answer([])
        answer.set_result(Response(tokens[:], log_probs[:], "length", text, [(0, self.version)]))
        return answer

    EmbeddedEngine.generate = generate  # type: ignore[method-assign]
    EmbeddedTrainer.step = lambda *_: {}  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
