"""``miles plan``: show the plan of a run, or every reason why it cannot start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from miles_core.plugin.detect import HARDWARE

USAGE = "miles plan [--json] [--fact NAME=VALUE] [--hardware [MACHINESx][GPUSx]TYPE] [any option of miles train]"


def make_parser(usage: str, description: str) -> argparse.ArgumentParser:
    """Create the parser of a command that also accepts the options of ``miles train``."""
    parser = argparse.ArgumentParser(prog="miles", usage=usage, description=description, allow_abbrev=False)
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
    """Print the plan. Raises PlanError if the run cannot start."""
    options, rest = make_parser(USAGE, "Resolve a run without starting it.").parse_known_args(list(argv))
    from miles_core.config.load import load
    from miles_core.contracts.hooks import HOOKS
    from miles_core.plugin.render import describe
    from miles_core.redact import redact
    from miles_core.run.prepare import apply_plan, prepare
    from miles_tools.authoring.scan import scan_hooks

    config = load(rest)
    plan, catalogue = prepare(config, collect_facts(options))
    hooks = scan_hooks(plan, HOOKS)
    if config.model.hf_checkpoint is not None:
        from miles_core.run.model_check import check_model

        check_model(apply_plan(config, plan), plan, catalogue, weights=False)
    print(redact(plan.to_json() if options.json else describe(plan, hooks)))
    return 0
