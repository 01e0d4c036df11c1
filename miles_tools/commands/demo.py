"""``miles demo``: creates a small mixture-of-experts model and a task, trains it with ``miles train``, and writes the report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from miles_core.config.command import CommandParser
from miles_core.errors import ConfigError
from miles_tools.demo.cuda_context import open_context


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 130 if the user stopped the training."""
    chosen, extra, command = _parser().parse_own(argv)
    if chosen.dir == "":
        raise ConfigError("--dir '': the path is empty; leave it out for runs/demo-<time>")
    if chosen.device != "cpu" and not any(
        word.startswith("--runtime") for word in extra
    ):  # this process will use the GPU
        open_context()
    directory = Path(chosen.dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    from miles_core.config.load import load
    from miles_core.plugin.discovery import discover
    from miles_core.run.prepare import prepare
    from miles_tools.demo.inputs import make_inputs, plugins_shown, train_arguments

    plugins = plugins_shown(discover())
    given = [f"--device={chosen.device}", *extra]
    gpu = _runs_on_a_gpu(chosen.device)
    if not gpu:
        _leave_processors_to_others()
    arguments = train_arguments(directory, chosen.seed, plugins, given, gpu)
    made = tuple(arguments[: len(arguments) - len(extra)])
    config = load(extra, command=replace(command, before=made))  # report invalid arguments before creating anything
    prepare(config.replace({"model.hf_checkpoint": None}, origin="made by the demo"))
    _say("two-digit addition: a supervised warm start from a careless teacher, then GRPO on right answers")
    if not plugins:
        _say("no installed plugin supports the demo; running without plugins")
    parameters = make_inputs(directory, chosen.seed, gpu)
    _say(f"made a Qwen3-MoE of {parameters:,} parameters and its data in {directory}; now running")
    _say(f"  miles train {' '.join(arguments)}")
    from miles_core.cli import train

    code = train.run(arguments)
    if code:  # the run's last lines describe how to continue
        return code
    from miles_tools.demo.outcome import outcome
    from miles_tools.report.report import report

    result = outcome(directory, report(directory))
    print(result.json() if chosen.json else result.text())
    return 0


def _runs_on_a_gpu(device: str) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available()


def _leave_processors_to_others() -> None:
    """Use fewer threads if other processes use some of the processors: threads that wait for each other make a step several times as long.
    ``OMP_NUM_THREADS`` sets another number."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = free_processors(processors, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
    if threads < processors:
        import torch

        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that the run starts
        used = f"{threads} thread{'s' * (threads > 1)}"
        others = f"other processes use about {processors - threads} of {processors} processors"
        _say(f"{others}: running with {used} (OMP_NUM_THREADS sets another number)")


def free_processors(processors: int, load: float) -> int:
    """Return how many processors are free, at least one. load: processes that were running or waiting in the last minute, on average."""
    return max(processors - round(load), 1)


def _parser() -> CommandParser:
    parser = CommandParser(
        "demo",
        description="Train a small Qwen3-MoE to add two-digit numbers, on this machine, in minutes: a supervised warm "
        "start, then GRPO with the installed plugins that support the demo. It creates model and data, runs miles train, and "
        "writes a report. Flags of miles train override the demo's values, e.g. --num-rollout 50 or --plugins NAME.",
    )
    parser.add_argument("--dir", "--save", help="run directory (default: runs/demo-<time>)")
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and training (default: 0)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line instead of a summary")
    return parser


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
