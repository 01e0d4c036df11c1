"""``miles plan``: what a run would consist of, or every reason why it cannot start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from miles_core.plugin.detect import HARDWARE

USAGE = "miles plan [--json] [--fact NAME=VALUE] [--hardware [MACHINESx][GPUSx]TYPE] [any option of miles train]"


def parser(usage: str, description: str) -> argparse.ArgumentParser:
    """A parser for a command that takes the options of ``miles train`` besides its own."""
    made = argparse.ArgumentParser(prog="miles", usage=usage, description=description, allow_abbrev=False)
    made.add_argument(
        "--fact", action="append", default=[], metavar="NAME=VALUE", help="plan with this value, e.g. gpu.sm=100"
    )
    made.add_argument(
        "--hardware", metavar="GPUS", help="plan for other machines, e.g. B200, 8xH200 or 4x8xH100 (four machines)"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def given(options: argparse.Namespace) -> list[str]:
    """The facts to plan with, ``NAME=VALUE`` each."""
    hardware = [f"{HARDWARE}={options.hardware}"] if options.hardware else []
    return [*hardware, *options.fact]


def run(argv: Sequence[str]) -> int:
    """Print the plan; a run that cannot start is a ``PlanError``."""
    options, rest = parser(USAGE, "Resolve a run without starting it.").parse_known_args(list(argv))
    from miles_core.config.load import load
    from miles_core.contracts.hooks import HOOKS
    from miles_core.plugin.render import describe
    from miles_core.run.prepare import apply_plan, prepare
    from miles_tools.authoring.scan import implemented

    config = load(rest)
    plan, catalogue = prepare(config, given(options))
    hooks = implemented(plan, HOOKS)
    if config.model.hf_checkpoint is not None:
        from miles_core.run.checks import check_model  # with torch, for the headers of weights

        check_model(apply_plan(config, plan), plan, catalogue, weights=False)
    print(plan.to_json() if options.json else describe(plan, hooks))
    return 0
