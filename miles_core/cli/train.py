"""``miles train``: configuration -> plan -> run."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.config.help import help_text, requested
from miles_core.config.load import load, schema_for

DRY_RUN = "--dry-run"
SWITCHES = ((DRY_RUN, "check everything but the numbers in the weights, print the resolved plan and stop"),)


def run(argv: Sequence[str]) -> int:
    """Train as ``argv`` says; 128 + its number when a signal stopped the run at a completed step (Ctrl-C: 130)."""
    if (words := requested(argv)) is not None:
        print(help_text(schema_for(argv), words, "miles train", SWITCHES), end="")
        return 0
    given = load([word for word in argv if word != DRY_RUN])
    from miles_core.run.checks import check_start, plan_run

    config, plan, catalogue = plan_run(given)
    if DRY_RUN in argv:
        from miles_core.plugin.render import describe

        here = (
            config.model.hf_checkpoint == given.model.hf_checkpoint
        )  # else a name, whose weights are not downloaded for this
        run = check_start(config, plan, catalogue, weights=here)
        print(describe(plan, run.hooks.implemented))
        return 0
    from miles_core.launch import launch
    from miles_core.run.prepare import localise

    localise(given)  # the weights too, now that the plan is accepted

    signal = launch(config, plan, catalogue).signal
    return 128 + signal if signal else 0
