"""``miles verify``: checks whether engine and trainer compute the same log-probs for the same tokens, and finds the causes of a gap."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.cli.plan import collect_facts, make_parser
from miles_core.errors import ConfigError
from miles_core.redact import redact

if TYPE_CHECKING:
    from miles_core.config.command import Command
    from miles_core.config.config import Config
    from miles_tools.verify.verify import Verification

#: Environment variable with the key of a server (``miles_tools.verify.server`` imports more than a parser needs).
TOKEN = "MILES_VERIFY_TOKEN"

USAGE = "miles verify --hf-checkpoint DIR [--budget [--url URL [--url-model NAME]]] [--exact] [--json] [any option of miles train]"
DESCRIPTION = (
    "Build engine and trainer as miles train would, generate a few responses, score them on both sides and show how far "
    "the log-probs differ and on which tokens. Prompts come from --prompt-data where it is given; with --load the "
    "weights of a run. Writes verify.html, verify.json and plots into --save DIR (default: runs/verify-<model>-<time>). "
    "Exits with 1 when the mean |difference| is beyond --verify-logprobs-tolerance. With --budget --url, a running server of another "
    "framework takes the place of the engine, and the exit code is 1 when a cause beyond rounding was found."
)


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 0 if the gap is within the tolerance, else 1."""
    made = make_parser("verify", USAGE, DESCRIPTION)
    made.add_argument("--budget", action="store_true", help="divide the gap among its causes")
    made.add_argument(
        "--exact", action="store_true", help="compare every module's outputs; exit with 1 unless bit-identical"
    )
    made.add_argument(
        "--url",
        metavar="URL",
        help="with --budget: address of a running server (SGLang, vLLM, or another one with /v1/completions and log-probs) that serves "
        f"--hf-checkpoint; the environment variable {TOKEN} holds its key",
    )
    made.add_argument(
        "--url-model", metavar="NAME", help="model of the server, if it has several (uses /v1/completions)"
    )
    options, rest, command = made.parse_own(argv)
    if options.url is not None or options.url_model is not None:
        return _verify_url(options, rest, command, argv)
    from miles_core.config.load import load
    from miles_core.run.prepare import apply_plan, localise, prepare

    command = replace(command, before=("--verify-logprobs",))  # which --verify-logprobs-tolerance needs
    config = localise(load(rest, command=command))
    plan, catalogue = prepare(config, collect_facts(options))
    config = apply_plan(config, plan)
    from miles_core.checkpoint.directory import checkpoint_step, locate_checkpoint
    from miles_core.observe import log as logs
    from miles_core.observe.hints import hints_of
    from miles_core.run.make import make_run
    from miles_core.run.parts import build_parts, notify_plugins
    from miles_tools.verify.verify import verify

    logs.configure(config.run.log_level if config.is_set("log_level") else "warning")
    directory = output_directory(config)
    resume = locate_checkpoint(config.run.load, plan.record()) if config.run.load else None
    made_run = make_run(config, plan, catalogue, directory)
    made_run.step = checkpoint_step(resume) if resume else 0

    async def verified() -> list[Verification]:
        with notify_plugins(made_run, hints_of(catalogue.values(), plan.holds)):
            async with build_parts(made_run) as parts:
                return await verify(made_run, parts, resume, options.budget, options.exact)

    found = asyncio.run(verified())
    return _show(directory, found, argv, options.json)


def _verify_url(options: argparse.Namespace, rest: list[str], command: Command, argv: Sequence[str]) -> int:
    """Divide the gap of a running server among its causes."""
    if options.url is None or not options.budget or options.exact:
        raise ConfigError(
            "--url-model needs --url"
            if options.url is None
            else "--url: only the budget of a server can be measured; give --budget, without --exact"
        )
    from miles_core.config.load import load
    from miles_core.observe import log as logs
    from miles_core.run.prepare import localise
    from miles_tools.verify.server import connect
    from miles_tools.verify.server_budget import verify_server

    config = localise(load(rest, command=command))
    if config.model.hf_checkpoint is None:
        raise ConfigError("--url needs --hf-checkpoint, the checkpoint that the server loaded")
    logs.configure(config.run.log_level if config.is_set("log_level") else "warning")
    directory = output_directory(config)
    found = asyncio.run(verify_server(connect(options.url, options.url_model), rest, config, directory))
    return _show(directory, [found], argv, options.json)


def _show(directory: Path, found: list[Verification], argv: Sequence[str], as_json: bool) -> int:
    """Write the page and print the result; returns the exit code."""
    from miles_tools.verify.page import tables, verdict, write_page

    page = write_page(directory, found, directory.name, redact(shlex.join(["miles", "verify", *argv])))
    if as_json:
        print(json.dumps({"ok": all(f.ok for f in found), "page": str(page), "policies": [f.to_dict() for f in found]}))
    else:
        from rich.console import Console

        console = Console()  # the log's is standard error
        for one in found:
            for table in tables(one, console):
                console.print(table)
            console.print(verdict(one), markup=False)
        console.print(f"written to {page.resolve()}", markup=False, soft_wrap=True)
    return 0 if all(f.ok for f in found) else 1


def output_directory(config: Config) -> Path:
    """``--save``, else ``runs/verify-<model>-<time>``."""
    if config.run.save is not None:
        return Path(config.run.save)
    label = config.model.model_name or Path(config.model.hf_checkpoint or "model").name
    return Path("runs") / f"verify-{label}-{time.strftime('%Y%m%d-%H%M%S')}"
