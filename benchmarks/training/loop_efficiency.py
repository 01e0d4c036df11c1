"""How fast engine and trainer are inside ``miles train``, compared with each of them alone: seconds, their ratio, and where the time goes.

Three processes take turns on one machine: the embedded engine alone (the requests of ``embedded_rollout.py``), the embedded trainer alone
(the batch of ``embedded_training.py``), and ``miles train`` with both: random BF16 models, 32 prompts of 64 tokens x 8 samples of up to 256
tokens, one optimiser step. A turn is ``--steps-a-turn`` steps after one that is not counted. The split of a step is exclusive: each second
counts once. ``gpu_wait`` is the time in which the host waits for results. ``rollout.driver`` is what remains of the rollout outside the
engine; ``train.host`` is what remains of the training phase. ``--profile`` adds a turn of each under a sampling profiler and one under
torch's (busy seconds of the GPU). ``--tiny`` measures a small model, for a rehearsal on a CPU (FP32 there). The last line is one JSON object.

    python benchmarks/training/loop_efficiency.py --models dense moe --turns 5 --profile --save

No installation is needed: workers import this checkout and the entry points of its ``pyproject.toml`` files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measure import Reporter, Worker, alternate, finish, installed, medians, options, spread  # noqa: E402

SIDES = ("engine", "trainer", "loop")
PROMPT, SAMPLES = 64, 8


def main() -> None:
    parser = options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", choices=["dense", "moe", "tiny_dense"], default=["dense", "moe"])
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens, for a rehearsal")
    parser.add_argument("--plugins", default="tis", help="plugins of the run (default: tis)")
    parser.add_argument("--flags", default="", help="further flags of the run")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each side")
    parser.add_argument("--warm-up", type=int, default=1, help="unmeasured turns of each side")
    parser.add_argument("--steps-a-turn", type=int, default=2, help="counted steps of a turn, after one that is not")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a response")
    parser.add_argument("--max-tokens", type=int, default=32768, help="computed tokens of a micro-batch")
    parser.add_argument("--profile", action="store_true", help="profile one more turn of each side")
    parser.add_argument("--out", type=Path, help="write results here after every model")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    for name in ("--worker", "--model", "--checkpoint", "--directory"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tiny:
        given.models, given.prompts, given.tokens, given.turns, given.steps_a_turn = ["tiny_dense"], 2, 16, 2, 1
    if given.worker:
        {"engine": work_as_engine, "trainer": work_as_trainer, "loop": work_as_loop}[given.worker](given, Reporter())
        return
    found: dict[str, Any] = {"turns": given.turns, "steps_a_turn": given.steps_a_turn, "gpu": gpu_name()}
    for model in given.models:
        found[model] = compare(given, model)
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1))
    finish("loop_efficiency", found, given.save, lambda: installed("torch", "transformers"), given.variant)


def compare(given: argparse.Namespace, model: str) -> dict[str, Any]:
    """Measure one model in turns; return medians, ratios, splits and profiles."""
    from benchmarks.engine.checkpoints import make_model

    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        directory = Path(temporary)
        add_entry_points(directory / "entry_points")
        checkpoint = make_model(model, directory / "model")
        common = ["--model", model, "--checkpoint", str(checkpoint), "--directory", temporary]
        for name in ("plugins", "flags", "turns", "warm_up", "steps_a_turn", "prompts", "tokens", "max_tokens"):
            common.append(f"--{name.replace('_', '-')}={getattr(given, name)}")
        common += ["--profile"] if given.profile else []
        workers = []
        for side in SIDES:
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", side, *common]
            workers.append(Worker(f"{model} {side}", command, given.threads))
            stack.callback(workers[-1].close)
        reports = alternate(workers, given.turns, given.warm_up)
        profiles = {side: worker.turn() for side, worker in zip(SIDES, workers, strict=True)} if given.profile else {}
    return summarize({side: reports[f"{model} {side}"] for side in SIDES}) | {"profiles": profiles}


def summarize(reports: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians per side, and alone / in the loop for rollout, training and both."""
    sides = {side: medians(found) for side, found in reports.items()}
    alone, loop = {side: sides[side]["seconds"] for side in ("engine", "trainer")}, sides["loop"]
    return {
        "sides": {side: sides[side] | {"range": spread(found)} for side, found in reports.items()},
        "ratio": {
            "rollout": round(alone["engine"] / loop["time/rollout"], 3),
            "rollout_tokens_per_second": round(loop["tokens_per_second"] / sides["engine"]["tokens_per_second"], 3),
            "train": round(alone["trainer"] / loop["time/train"], 3),
            "step": round(sum(alone.values()) / loop["seconds"], 3),
        },
    }


def add_entry_points(directory: Path) -> None:
    """Make workers import this checkout's packages and plugins, whatever is installed."""
    from benchmarks.project.same_numbers import write_entry_points

    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    projects = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in files]
    write_entry_points(directory, {project["name"]: project.get("entry-points", {}) for project in projects})
    paths = [str(directory), *(str(path.parent) for path in files), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def synchronize() -> None:
    """Wait until the GPU has computed everything, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- workers: each reports once per turn ---------------------------------------------------------------------------------


class Turns:
    """Runs the steps of a worker's turns: ``wait`` and ``begin`` before, ``end`` after each. After the measured turns one is profiled."""

    def __init__(self, given: argparse.Namespace, reporter: Reporter, split: Any) -> None:
        self.given, self.reporter, self.split = given, reporter, split
        self.turn = self.done = 0
        self._steps: list[dict[str, float]] = []
        self._profiler: Any = None
        self._torch: Any = None
        self._found: dict[str, Any] = {}

    @property
    def steps(self) -> int:
        """Steps of all turns; a profiled turn has one more."""
        given = self.given
        return int((given.warm_up + given.turns + 1) * (given.steps_a_turn + 1) + 1)

    def wait(self) -> None:
        """Wait for the turn if this is its first step."""
        if not self.done:
            self.reporter.wait()

    def begin(self) -> None:
        """Start profilers, and reset the split. Call it in the thread of ``end``."""
        if self._profiled and self.done == self.given.steps_a_turn - 1:
            from benchmarks.time_split import sample_threads

            self._profiler = sample_threads()
            self._found["threads"] = self._profiler.__enter__()
        elif self._profiled and self.done == self.given.steps_a_turn:
            self._torch = start_torch_profiler()
        synchronize()
        self.split.take()

    def end(self, seconds: float, **numbers: float) -> None:
        """Record a step; report the means after the last one of a turn."""
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._found["threads"], self._profiler = self._found["threads"].table(), None
        if self._torch is not None:
            from benchmarks.engine.embedded_rollout import breakdown

            self._torch.stop()
            self._found["gpu"], self._torch = breakdown(self._torch, seconds, 1), None
        self._steps.append({"seconds": seconds, **numbers})
        self.done += 1
        if self.done <= self.given.steps_a_turn:
            return
        counted = self._steps[1:]
        means = {name: sum(step.get(name, 0.0) for step in counted) / len(counted) for name in counted[-1]}
        self._steps, self.done = [], 0
        self.turn += 1
        self.reporter.send(**means, **self._found)

    @property
    def _profiled(self) -> bool:
        return bool(self.given.profile) and self.turn == self.given.warm_up + self.given.turns


def start_torch_profiler() -> Any:
    """Start torch's profiler of kernels; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    return profiler


def watch_engine(split: Any) -> None:
    """Divide the engine's steps into phases."""
    from miles_embedded.engine.async_scheduling import AsyncScheduling
    from miles_embedded.engine.decoder import AsyncSteps
    from miles_embedded.engine.engine import EmbeddedEngine
    from miles_embedded.engine.scheduler import Scheduler

    split.wrap(EmbeddedEngine, ["_step"], "bookkeeping")
    split.wrap(EmbeddedEngine, ["_admit"], "admission")
    split.wrap(EmbeddedEngine, ["_finish"], "responses")
    split.wrap(Scheduler, ["make_row"], "admission")
    split.wrap(Scheduler, ["accept"], "scheduler")
    split.wrap(AsyncScheduling, ["_make_ready"], "prepare")
    split.wrap(AsyncScheduling, ["_launch"], "launch")
    split.wrap(AsyncSteps, ["_next", "_read"], "prepare")
    split.watch_gpu("gpu_wait")


def watch_trainer(split: Any) -> None:
    """Divide the trainer's steps into phases; a wait for the GPU inside them counts as ``gpu_wait`` (see ``watch_engine``)."""
    import torch

    from miles_core.train.rank import Rank
    from miles_embedded.trainer.trainer import EmbeddedTrainer

    split.wrap(Rank, ["learn"], "rank")
    split.wrap(EmbeddedTrainer, ["step", "columns"], "trainer")
    split.wrap(EmbeddedTrainer, ["forward"], "forward")
    split.wrap(torch.Tensor, ["backward"], "backward")
    split.wrap(EmbeddedTrainer, ["optimizer_step"], "optimizer")


def work_as_engine(given: argparse.Namespace, reporter: Reporter) -> None:
    """Generate the requests of a rollout with the engine alone."""
    from benchmarks.engine.embedded_rollout import make_engine, requests, rollout
    from benchmarks.time_split import TimeSplit

    split = TimeSplit()
    watch_engine(split)
    engine = make_engine("ahead", Path(given.checkpoint), device(), dtype(given))
    asked = requests(given.prompts * SAMPLES, given.tokens, False)
    turns = Turns(given, reporter, split)
    reporter.send(side="engine")
    while True:
        turns.wait()
        turns.begin()
        seconds = rollout(engine, asked)
        numbers = with_rest(split.take(), "rollout", seconds, "driver")
        turns.end(seconds, tokens_per_second=len(asked) * given.tokens / seconds, **numbers)


def work_as_trainer(given: argparse.Namespace, reporter: Reporter) -> None:
    """Train on the batch of a step with the trainer alone."""
    from benchmarks.time_split import TimeSplit
    from benchmarks.training.embedded_training import make_batch, make_trainer, timed

    split = TimeSplit()
    split.watch_gpu("gpu_wait")
    watch_trainer(split)
    trainer = make_trainer("kernels", Path(given.checkpoint), device(), given, dtype(given))
    batch = make_batch(given.prompts, given.tokens)
    turns = Turns(given, reporter, split)
    reporter.send(side="trainer")
    while True:
        turns.wait()
        turns.begin()
        seconds = timed(trainer, batch)
        turns.end(seconds, **with_rest(split.take(), "train", seconds, "gpu_wait"))


def work_as_loop(given: argparse.Namespace, reporter: Reporter) -> None:
    """Run ``miles train``, held before each step."""
    from benchmarks.time_split import TimeSplit
    from miles_core import loop
    from miles_core.cli import train
    from miles_core.observe.metrics import read

    os.environ["TOKENIZERS_PARALLELISM"] = (
        "true"  # as for users, who do not set it: ``Worker`` disables it for other libraries
    )
    split = TimeSplit()
    turns = Turns(given, reporter, split)
    original: Callable[..., Any] = loop.step
    directory = Path(given.directory) / "loop"
    directory.mkdir()
    measured: dict[str, float] = {}
    watch_loop(split, measured)

    async def timed_step(run: Any, *parts: Any) -> None:
        await asyncio.to_thread(turns.wait)
        turns.begin()
        measured.clear()
        started = time.perf_counter()
        await original(run, *parts)
        synchronize()
        seconds = time.perf_counter() - started
        record = read(run.directory / "metrics.jsonl")[-1]
        phases = {name: value for name, value in record.items() if name.startswith("time/") and name != "time/step"}
        rate = record["rollout/tokens"] / phases["time/rollout"]
        turns.end(seconds, tokens_per_second=rate, length=record["rollout/length_mean"], **phases, **measured)

    loop.step = timed_step  # type: ignore[assignment]
    reporter.send(side="loop")
    train.run(flags_of(given, directory, turns.steps))


def watch_loop(split: Any, measured: dict[str, float]) -> None:
    """Divide rollout and training of ``miles train``; each phase's split goes to ``measured``."""
    from miles_core.train.local_learner import LocalLearner

    watch_engine(split)
    watch_trainer(split)
    learn: Callable[..., Any] = LocalLearner.learn

    async def split_learn(self: Any, *args: Any) -> Any:
        started = time.perf_counter()
        measured.update(with_rest(split.take(), "rollout", None, ""))
        try:
            return await learn(self, *args)
        finally:
            found, seconds = split.take(), time.perf_counter() - started
            synchronize()
            waited = time.perf_counter() - started - seconds
            found["gpu_wait"] = found.get("gpu_wait", 0.0) + waited
            measured.update(with_rest(found, "train", seconds + waited, "host"))

    LocalLearner.learn = split_learn  # type: ignore[method-assign,assignment]


def with_rest(seconds: dict[str, float], prefix: str, total: float | None, rest: str) -> dict[str, float]:
    """Name the phases ``PREFIX.PHASE``, and add what they leave of ``total`` to the phase ``rest``."""
    found = {f"{prefix}.{phase}": value for phase, value in seconds.items()}
    if total is not None:
        found[f"{prefix}.{rest}"] = found.get(f"{prefix}.{rest}", 0.0) + total - sum(seconds.values())
    return found


def flags_of(given: argparse.Namespace, directory: Path, steps: int) -> list[str]:
    """Return the command line of the run."""
    from benchmarks.training.sglang_step import workload

    flags = f"""--hf-checkpoint {given.checkpoint} --save {directory / "run"} --dtype {dtype(given)} --device {device()}
        --rollout-batch-size {given.prompts} --n-samples-per-prompt {SAMPLES} --rollout-max-response-len {given.tokens}
        --num-rollout {steps} --lr 1e-6 --max-running-requests {given.prompts * SAMPLES} --use-dynamic-batch-size
        --max-tokens-per-gpu {given.max_tokens} --seed 0 --rollout-max-context-len {PROMPT + given.tokens + 8}
        --log-level warning {given.flags}"""
    plugins = ["--plugins", *given.plugins.split()] if given.plugins else []
    return [*flags.split(), *workload(directory, given.prompts), *plugins]


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype(given: argparse.Namespace) -> str:
    """Return the type of the weights; many CPUs multiply BF16 slowly."""
    return "float32" if given.model.startswith("tiny") and device() == "cpu" else "bfloat16"


if __name__ == "__main__":
    main()
