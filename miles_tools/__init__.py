"""Tools besides training: conversion, verification, report, demo, diagnosis, and tools for plugin authors.

They extend core like a third-party plugin, through this manifest: commands, sinks, rewards and the report. Core does not import them.
"""

from miles_core import __version__
from miles_core.plugin import Command, Plugin

_COMMANDS = {
    "demo": "train a small model on this machine in minutes and write a report",
    "plugins": "list what is installed; check, explain, matrix, new",
    "convert": "convert a checkpoint to a number format, or back to bf16",
    "verify": "check that engine and trainer agree about the same tokens, and explain the gap",
    "report": "write an HTML report of a run",
    "watch": "serve a page on this machine that follows runs while they work",
    "replay": "repeat the training of a recorded step and compare the result",
    "diff": "find the first step, phase, sample, token and tensor in which two runs part",
    "doctor": "show environment, versions, hardware, and what each plugin can do here",
    "completion": "print a script that completes commands and flags in bash, zsh or fish",
}

plugin = Plugin(
    name="bundled",
    summary="conversion, verification, reports and the demo, shipped with miles-core",
    version=__version__,
    core=f"=={__version__}",
    commands={name: Command(summary, f"miles_tools.commands.{name}:run") for name, summary in _COMMANDS.items()},
    standard=True,
    examine="miles_tools.examine:examine",
    provides={
        "reward": {
            "math": "miles_tools.rewards.math_verifier:make_reward",
            "remote": "miles_tools.rewards.remote:make_reward",
        },
        "sink": {
            "profile": "miles_tools.profiler:make_profiler",
            "samples": "miles_tools.samples.saver:make_saver",
            "steps": "miles_tools.replay.recorder:make_recorder",
        },
        "correction": {
            "command_line": "miles_tools.command_line:correct",
            "foreign_option": "miles_tools.command_line:explain",
        },
        "samples": {"read": "miles_tools.samples.files:read_rollouts"},
        "report": {"html": "miles_tools.report.report:report"},
    },
)
