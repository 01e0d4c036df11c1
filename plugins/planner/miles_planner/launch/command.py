"""``miles launch slurm``: resolves the plan of a run for the given hardware and writes the file that starts it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from miles_core.cli.plan import check_hardware, collect_facts
from miles_core.config.command import TRAIN, Command, CommandParser
from miles_core.plugin import ConfigError, redact
from miles_planner.launch import slurm
from miles_planner.launch.job import Job
from miles_planner.packages import check_packages

#: Kinds of launch files.
KINDS = ("slurm",)
USAGE = "miles launch slurm --hardware MACHINESxGPUSxTYPE [--image IMAGE] [any option of miles train]"


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that describe the job."""
    parser.add_argument("--name", default="miles", help="name of the job (default: miles)")
    parser.add_argument("--image", default="", help="container image (default: what is installed)")
    parser.add_argument(
        "--shared", default="/shared", metavar="DIR", help="directory that all machines share (default: /shared)"
    )
    parser.add_argument("--hours", type=int, default=24, metavar="N", help="time limit (default: 24)")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="file to write (default: NAME.sbatch)")


def run(argv: Sequence[str]) -> int:
    """Implement the command. Raises PlanError if the run cannot start on that hardware."""
    parser = CommandParser("launch", usage=USAGE)
    parser.add_argument("kind", choices=KINDS, help="kind of launch file")
    parser.add_argument("--hardware", metavar="GPUS", required=True, help="the machines, e.g. 4x8xH100 or 32xH200")
    parser.add_argument("--fact", action="append", default=[], metavar="NAME=VALUE", help="plan with this value")
    add_options(parser)
    options, rest, command = parser.parse_own(argv)
    print(write_file(options, rest, command))
    return 0


def write_file(options: argparse.Namespace, argv: Sequence[str], command: Command = TRAIN) -> str:
    """Write the launch file of a run and return a message with the next command.

    Args:
        options: the job's options and ``--hardware``.
        argv: options of ``miles train``.
        command: the command of these options, for error messages.

    Raises:
        PlanError: the run cannot start on that hardware.
        ConfigError: several machines without a runtime for them, or an invalid option of the job.
    """
    job = make_job(options, argv, command)
    path = options.out or Path(f"{job.name}{slurm.SUFFIX}")
    text = slurm.write(job)
    if redact(text) != text:
        raise ConfigError(
            f"{path}: an option of this command looks like a credential, and the file would keep it; give it to the job as an environment "
            "variable"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: the file cannot be written ({error.strerror})") from error
    said = f"wrote {path}: {job.machines} x {job.gpus} x {job.gpu}, {job.header}\nstart it with: {slurm.submit(os.fspath(path))}"
    if len(job.command) > len(argv) + 2:
        said += f"\nadded {' '.join(job.command[-2:])}: the run's directory must be one that all machines share"
    if elsewhere := paths_outside(argv, job.shared):
        needs = (
            "which is all that the container sees" if job.image else "so that every machine needs them at the same path"
        )
        said += f"\nnot below --shared {job.shared}, {needs}: {', '.join(elsewhere)}"
    return said


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for an invalid option of the job, before the run is known."""
    Job(options.name, 1, 1, "", (), "", options.image, options.shared, options.hours)


def paths_outside(argv: Sequence[str], shared: str) -> list[str]:
    """Return the paths in a command line that are not below the shared directory: absolute ones, and files of this machine."""
    values = dict.fromkeys(word.rpartition("=")[2].partition(":")[0] for word in argv if "/" in word)
    paths = (value for value in values if value.startswith("/") or Path(value).exists())
    return [path for path in paths if not Path(os.path.abspath(path)).is_relative_to(shared)]


def make_job(options: argparse.Namespace, argv: Sequence[str], command: Command = TRAIN) -> Job:
    """Resolve the plan of a run and describe its job."""
    from miles_core.config.load import load
    from miles_core.run.prepare import prepare

    check_hardware(["--hardware", options.hardware])
    check_packages(argv)
    config = load(argv, command=command)
    plan, _ = prepare(config, collect_facts(options))
    machines, gpus = int(plan.fact("gpu.machines") or 1), plan.fact("gpu.count")
    if not gpus:
        raise ConfigError(f"--hardware {options.hardware}: give the number of GPUs, for example 2x8xH200")
    if machines > 1 and config.run.runtime == "inline":
        raise ConfigError(
            f"--hardware {options.hardware}: a run on {machines} machines needs a runtime with several processes, for example --runtime ray"
        )
    words = ("miles", "train", *argv)
    if config.run.save is None and config.run.load is None:
        words = (*words, "--save", f"{options.shared.rstrip('/')}/{options.name}")
    return Job(
        options.name,
        machines,
        int(gpus),
        str(plan.fact("gpu")),
        words,
        plan.header,
        options.image,
        options.shared,
        options.hours,
        config.run.stop_within,
    )
