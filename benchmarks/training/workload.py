"""What the scripts here work on: a random 1.8 M-parameter Qwen3-MoE, addition prompts, and a reward that always varies."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Steps
from miles_tools.demo.model import BENCHMARK, Size, make_checkpoint
from miles_tools.demo.task import LABEL_KEY, PROMPT_KEY, write_task

#: Samples of a prompt, most tokens of a response on a CPU and on a GPU, and the learning rate of whole steps that are compared.
SAMPLES, RESPONSE_TOKENS, GPU_TOKENS, LR = 8, 16, 256, 1e-6


@dataclass(frozen=True)
class Workload:
    """A checkpoint directory, a prompt file, and the prompts in it."""

    checkpoint: Path
    prompt_file: Path
    prompts: list[str]


def make_workload(directory: Path, shots: int = 0, size: Size = BENCHMARK) -> Workload:
    """Checkpoint and prompts in ``directory``. A prompt is 6 tokens (``37+58=``); each of ``shots`` worked examples
    before it adds about 9."""
    make_checkpoint(directory / "model", seed=0, size=size)
    files = write_task(directory / "data", seed=0)
    rows = [json.loads(line) for line in files.train.read_text().splitlines()]
    examples = "".join(f"{row[PROMPT_KEY]}{row[LABEL_KEY]}\n" for row in rows[:shots])
    rows = [{PROMPT_KEY: examples + row[PROMPT_KEY], LABEL_KEY: row[LABEL_KEY]} for row in rows[shots:]]
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Workload(directory / "model", path, [row[PROMPT_KEY] for row in rows])


def questions_for(directory: Path, model: Path, count: int = 512) -> Workload:
    """A real chat model and sums of two numbers to ask it for, as texts of its own chat template."""
    from transformers import AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(model), random.Random(0)
    prompts = []
    for _ in range(count):
        question = f"What is {draw.randint(10, 99)} + {draw.randint(10, 99)}? Answer with the number only."
        message = [{"role": "user", "content": question}]
        prompts.append(str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)))
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({PROMPT_KEY: text, LABEL_KEY: ""}) + "\n" for text in prompts))
    return Workload(model, path, prompts)


def letters(text: str) -> float:
    """Fraction of ASCII letters; samples of a random model differ in it, so every group has advantages."""
    return sum(c.isascii() and c.isalpha() for c in text) / RESPONSE_TOKENS


def random_words(directory: Path, kind: str, count: int = 512) -> Workload:
    """A random BF16 model of ``sglang_engine.py`` and prompts of 64 random words, one token each."""
    from benchmarks.engine.checkpoints import VOCABULARY, make_model

    draw = random.Random(0)
    prompts = [" ".join(f"w{draw.randrange(2, VOCABULARY)}" for _ in range(64)) for _ in range(count)]
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({PROMPT_KEY: text, LABEL_KEY: ""}) + "\n" for text in prompts))
    return Workload(make_model(kind, directory / "model"), path, prompts)


def odd(tokens: Sequence[int]) -> float:
    """Fraction of odd token ids, which differs within a group of random samples of any length."""
    return sum(token % 2 for token in tokens) / max(len(tokens), 1)


async def rm_odd(args: Any, sample: Any) -> float:
    """``odd`` as a custom reward."""
    return odd(sample.tokens[len(sample.tokens) - sample.response_length :])


async def rm(args: Any, sample: Any) -> float:
    """``letters`` as a custom reward."""
    return letters(sample.response)


def train_in_turns(
    flags: Sequence[str],
    wait: Callable[[], None],
    report: Callable[[dict[str, Any], float, float], None],
    settle: Callable[[], None] = lambda: None,
) -> None:
    """Run ``miles train``, held before each step.

    Args:
        flags: of the run, without ``--save``.
        wait: returns when the next step may start.
        report: called after each step with its metrics, its seconds and its processor seconds.
        settle: waits for the device, within the measured time.
    """
    from miles_core import loop
    from miles_core.cli import train
    from miles_core.observe.metrics import read

    original = loop.step

    async def timed_step(run: Any, *parts: Any) -> None:
        await asyncio.to_thread(wait)
        started, cpu = time.perf_counter(), time.process_time()
        await original(run, *parts)
        settle()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        report(read(run.directory / "metrics.jsonl")[-1], seconds, cpu)

    loop.step = timed_step  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as directory:
        train.run([*flags, "--save", f"{directory}/run"])


def device_of(given: argparse.Namespace) -> str:
    """Return where both sides compute."""
    return "cuda" if given.gpu and torch.cuda.is_available() else "cpu"


def wait_for_device(given: argparse.Namespace) -> None:
    """Wait until the GPU has computed everything, if there is one."""
    if device_of(given) == "cuda":
        torch.cuda.synchronize()


def release_memory(given: argparse.Namespace, turn: Steps) -> None:
    """Give memory that is cached and not in use back to the GPU before another process takes its turn; the next turn's uncounted step takes
    it again."""
    if turn.is_over and given.uncounted and device_of(given) == "cuda":
        torch.cuda.empty_cache()
