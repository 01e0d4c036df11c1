"""``miles plan``: show the plan of a run, or every reason why it cannot start."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from miles_core.config.command import CommandParser
from miles_core.errors import ConfigError
from miles_core.plugin.detect import HARDWARE

USAGE = "miles plan [--json] [--fact NAME=VALUE] [--hardware [MACHINESx][GPUSx]TYPE] [any option of miles train]"


def make_parser(name: str, usage: str, description: str) -> CommandParser:
    """Create the parser of the command ``miles NAME``, which also accepts the options of ``miles train``."""
    parser = CommandParser(name, usage=usage, description=description)
    parser.add_argument(
        "--fact", action="append", default=[], metavar="NAME=VALUE", help="plan with this value, e.g. gpu.sm=100"
    )
    parser.add_argument(
        "--hardware", metavar="GPUS", help="plan for other machines, e.g. B200, 8xH200 or 4x8xH100 (four machines)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def collect_facts(options: argparse.Namespace) -> list[str]:
    """Return the facts to plan with, as ``NAME=VALUE`` strings, from ``--hardware`` and ``--fact``."""
    hardware = [f"{HARDWARE}={options.hardware}"] if options.hardware else []
    return [*hardware, *options.fact]


def run(argv: Sequence[str]) -> int:
    """Print the plan, or with ``--search`` what a plugin proposes for the hardware. Raises PlanError if the run cannot start."""
    check_hardware(argv)
    if "--search" in argv:
        from miles_core.plugin.load import find_part

        search: Callable[[Sequence[str]], int] = find_part("search", "layouts", "miles-plugin-planner")
        return search(argv)
    parser = make_parser("plan", USAGE, "Resolve a run without starting it.")
    parser.add_argument(
        "--search",
        action="store_true",
        help="propose the fastest layouts of the run on --hardware (miles-plugin-planner; options: miles plan --search --help)",
    )
    options, rest, command = parser.parse_own(argv)
    from miles_core.config.load import load
    from miles_core.contracts.hooks import HOOKS
    from miles_core.plugin.render import describe
    from miles_core.plugin.scan import scan_hooks
    from miles_core.redact import redact
    from miles_core.run.directory import refuse_unusable_run
    from miles_core.run.prepare import apply_plan, prepare

    config = load(rest, command=command)
    refuse_unusable_run(config)
    plan, catalogue = prepare(config, collect_facts(options))
    hooks = scan_hooks(plan, HOOKS)
    if config.model.hf_checkpoint is not None:
        from miles_core.run.model_check import check_model

        check_model(apply_plan(config, plan), plan, catalogue, weights=False)
    print(redact(plan.to_json() if options.json else describe(plan, hooks)))
    return 0


def check_hardware(argv: Sequence[str]) -> None:
    """Refuse no hardware, and a cluster of several kinds of GPUs, for example ``8xH100,8xH200``, ``8xH100+8xH200`` or two
    options."""
    words = [*argv, ""]
    given = [words[i + 1] for i, word in enumerate(argv) if word == "--hardware"]
    given += [word.partition("=")[2] for word in argv if word.startswith("--hardware=")]
    kinds = list(dict.fromkeys(given))
    if "" in kinds:
        raise ConfigError("--hardware is empty: give machines, GPUs and their type, for example 2x8xH200")
    if len(kinds) > 1 or any(mark in hardware for hardware in kinds for mark in ",+;& "):
        raise ConfigError(
            f"--hardware {' and '.join(kinds)}: a run needs GPUs of one kind, because all ranks and engines wait for the slowest and must "
            "fit the smallest; plan for one kind, or for the weakest with the number of all"
        )
