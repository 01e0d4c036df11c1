"""``miles train``: load the configuration, resolve the plan and run it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from miles_core.config.load import load, schema_for
from miles_core.errors import PluginError
from miles_core.plugin.load import find_part
from miles_core.redact import redact
from miles_core.run.exits import locate_error, report_exits

HELP = ("--help", "-h", "--help-all")
DRY_RUN = "--dry-run"
SWITCHES = ((DRY_RUN, "check everything except the values of the weights, print the plan and stop"),)


def run(argv: Sequence[str]) -> int:
    """Train with the options in ``argv``. Returns 0, or 128 + the number of the signal that stopped the run (Ctrl-C: 130).

    Raises:
        PluginError: a plugin or a user's function called ``sys.exit``, whose status says nothing about the run.
    """
    with report_exits(_report_exit):
        try:
            return _run(argv)
        except SystemExit as error:
            raise PluginError(
                f"code that the run loads called sys.exit({error.code!r}) ({locate_error(error)}); raise an error instead"
            ) from error


def _report_exit(what: str) -> None:
    print(redact(f"error: code that the run loads ended the process: {what}; raise an error instead"), file=sys.stderr)


def _run(argv: Sequence[str]) -> int:
    if any(word in HELP for word in argv):
        print(find_part("help", "train")(argv, schema_for(argv), "miles train", SWITCHES), end="")
        return 0
    requested = load([word for word in argv if word != DRY_RUN])
    from miles_core.run.checks import check_start, plan_run

    config, plan, catalogue = plan_run(requested)
    if DRY_RUN in argv:
        from miles_core.plugin.render import describe

        # otherwise a name on the hub; a dry run does not download weights
        is_local = config.model.hf_checkpoint == requested.model.hf_checkpoint
        run = check_start(config, plan, catalogue, weights=is_local)
        print(redact(describe(plan, run.hooks.implemented)))
        return 0
    from miles_core.launch import launch
    from miles_core.run.prepare import localise

    localise(requested)  # download the weights too, now that the plan is accepted
    gc.freeze()  # the modules: a search for garbage need not visit them
    signal = launch(config, plan, catalogue).signal
    return 128 + signal if signal else 0
