"""Tools in core's wheel: conversion, verification, report, demo, diagnosis, plugin authoring.

They extend core like a third-party plugin, through this manifest: commands, reports and rewards. Core does not import them.
"""

from miles_core import __version__
from miles_core.plugin import Command, Plugin
from miles_tools.hints import HINTS

_COMMANDS = {
    "demo": "train a small model on this machine in minutes and write a report",
    "plugins": "list what is installed; check, explain, new",
    "convert": "convert a checkpoint to a number format, or back to bf16",
    "verify": "check that engine and trainer agree about the same tokens, and explain the gap",
    "report": "write an HTML report of a run",
    "doctor": "show environment, versions, hardware, and what each plugin can do here",
    "completion": "print a script that completes commands and flags in bash, zsh or fish",
}

plugin = Plugin(
    name="commands",
    summary="conversion, verification, reports and the demo, shipped with miles-core",
    version=__version__,
    core=f"=={__version__}",
    commands={
        "plan": Command(
            "show what a run would consist of, why it cannot start, or the fastest layouts (--search)",
            "miles_planning.commands:plan",
        ),
        "launch": Command(
            "write a Slurm script, a KubeRay manifest or a SkyPilot task that starts a run",
            "miles_planning.launch.command:run",
        ),
        **{name: Command(summary, f"miles_tools.commands.{name}:run") for name, summary in _COMMANDS.items()},
    },
    standard=True,
    examine="miles_tools.examine:examine",
    hints=HINTS,
    provides={
        "runtime": {"inline": "miles_runtime.inline_rollouts:make_runtime"},
        "reward": {
            "exact": "miles_tools.rewards.text_rules:make_exact",
            "boxed": "miles_tools.rewards.text_rules:make_boxed",
            "f1": "miles_tools.rewards.text_rules:make_f1",
            "math": "miles_tools.rewards.math_verifier:make_reward",
            "remote": "miles_tools.rewards.remote:make_reward",
        },
        "schedule": {
            "ahead": "miles_schedules.ahead:make_schedule",
            "async": "miles_schedules.continuous:make_schedule",
        },
        "check": {
            "weights_arrived": "miles_mismatch.weights_arrived:make_check",
            "first_sync": "miles_mismatch.first_sync:make_check",
            "verify_logprobs": "miles_mismatch.at_sync:make_check",
        },
        "sent_weights": {"checksums": "miles_transport.sent_weights:SentWeights"},
        "progress": {"terminal": "miles_tools.progress:TerminalProgress"},
        "sink": {
            "tensorboard": "miles_tools.sinks:make_tensorboard",
            "wandb": "miles_tools.sinks:make_wandb",
            "profile": "miles_tools.profiler:make_profiler",
            "samples": "miles_tools.samples.saver:make_saver",
        },
        "prompt_file": {"parquet": "miles_tools.parquet:ParquetFile"},
        "help": {"train": "miles_tools.help:help_text"},
        "correction": {
            "command_line": "miles_tools.command_line:correct",
            "foreign_option": "miles_tools.command_line:explain",
        },
        "samples": {"read": "miles_tools.samples.files:read_rollouts"},
        "record": {"environment": "miles_tools.environment:write_environment"},
        "report": {"html": "miles_tools.report.report:report"},
    },
    capabilities={"runtime": ("rollout_workers",)},
)
