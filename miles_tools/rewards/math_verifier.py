"""The ``math`` reward: scores whether the response's final answer is mathematically equal to the label.

``math_answer`` finds the answer. Equal texts and plain numbers are compared in this process; all other answers are passed to math-verify in
worker processes with a deadline, because sympy can run for hours on an unusual answer and a thread cannot be stopped.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles_core.contracts.run import Run
from miles_core.data.sample import Sample
from miles_core.reward.labels import Answer, answers_of, is_match, text_of
from miles_core.reward.reward import check_label, compares_label
from miles_tools.rewards.math_answer import compare_numbers, read_answer, tidy

DEADLINE_SECONDS = 20.0
START_SECONDS = 120.0
#: Worker processes of a run.
PROCESSES = min(4, os.cpu_count() or 1)

log = logging.getLogger(__name__)


class MathVerifier:
    """Callable ``verifier(response, label) -> 1.0 or 0.0``; thread-safe.

    A response whose verification fails or exceeds the deadline scores 0 and is counted in ``failures``; the first failure is logged.
    A label that is not mathematics is compared as text, without boxes.

    Args:
        workers: maximum number of processes; they start on demand.
        deadline: seconds per pair of response and label.
    """

    def __init__(self, workers: int | None = None, deadline: float = DEADLINE_SECONDS) -> None:
        self.deadline = deadline
        self.failures = 0
        self._lock = threading.Lock()
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers or PROCESSES):
            self._idle.put(None)  # placeholder for a worker that is not started yet
        atexit.register(self.close)

    def __call__(self, response: str | None, label: Any) -> float:
        accepted = answers_of(label)
        answer, boxed = read_answer(response or "")
        return float(bool(answer) and any(self._equal(answer, boxed, each) for each in accepted))

    def close(self) -> None:
        """End the idle worker processes."""
        places: list[_Worker | None] = []
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                break
            if worker is not None:
                worker.kill()
            places.append(None)
        for place in places:
            self._idle.put(place)

    def _equal(self, answer: str, boxed: bool, accepted: Answer) -> bool:
        if isinstance(accepted, bool):
            return is_match(answer, accepted)
        label, label_boxed = read_answer(text_of(accepted))
        plain = tidy(answer), tidy(label)
        if plain[0] == plain[1]:
            return True
        if (equal := compare_numbers(*plain)) is not None:
            return equal
        texts = [rf"\boxed{{{text}}}" if box else text for text, box in ((label, label_boxed), (answer, boxed))]
        verdict = self._ask({"label": texts[0], "response": texts[1]})
        if "error" in verdict:
            self._count_failure(verdict["error"], answer)
            return False
        if not verdict["readable"]:
            return is_match(*plain)
        return bool(verdict["equal"])

    def _ask(self, request: dict[str, str]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker()
            verdict = worker.ask(request, self.deadline)
            if verdict is None:
                worker.kill()
                worker = None
                return {"error": f"no verdict within {self.deadline:g} s, or its process died"}
            return verdict
        finally:
            self._idle.put(worker)

    def _count_failure(self, reason: str, response: str) -> None:
        with self._lock:
            self.failures += 1
            first = self.failures == 1
        if first:
            log.warning("math reward: %s; scored 0: ...%s (further ones are only counted)", reason, response[-200:])


def check_math_label(label: Any) -> None:
    """Check that a label of the reward ``math`` holds an answer; the text of a JSON object is none.

    Raises:
        DataError: see ``answers_of``.
    """
    for answer in answers_of(label):
        if isinstance(answer, str) and answer.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                check_label(json.loads(answer))


def make_reward(run: Run) -> Callable[[Any, Sample], Awaitable[float]]:
    """The reward named ``math``: 1 where the response's final answer equals the sample's label, else 0."""
    verifier = MathVerifier()
    threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="math")

    async def reward(args: Any, sample: Sample) -> float:
        return await asyncio.get_running_loop().run_in_executor(threads, verifier, sample.response, sample.label)

    return reward


compares_label(make_reward, check_math_label)


class _Worker:
    def __init__(self) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH", "")) if p)
        # -P: the current directory must not shadow modules; the worker must import the same miles_core as this process.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "miles_tools.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            encoding="utf-8",
            start_new_session=True,  # only this process handles Ctrl-C, so that the current step can finish with its rewards
        )
        if self._read(START_SECONDS) != {"ready": True}:
            code = self._process.poll()
            self.kill()
            raise RuntimeError(f"the math-verify process did not start (exit code {code}); its output is above")

    def ask(self, request: dict[str, str], deadline: float) -> dict[str, Any] | None:
        """Send a request and return the answer; None if the process died or was killed at the deadline."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(deadline)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # unsent input of a process that has ended

    def _read(self, seconds: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        return json.loads(line) if line.endswith("\n") else None
