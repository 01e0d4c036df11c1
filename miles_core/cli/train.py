"""``miles train``: configuration -> plan -> run."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.config.flags import print_help
from miles_core.config.load import load, schema_for
from miles_core.errors import ConfigError

DRY_RUN = "--dry-run"
SWITCHES = ((DRY_RUN, "print the resolved plan and stop"),)


def run(argv: Sequence[str]) -> int:
    """Train as ``argv`` says; 130 when the user stopped the run at a completed step."""
    if "--help" in argv or "-h" in argv:
        print_help(schema_for(argv), "miles train", SWITCHES)
        return 0
    config = load([word for word in argv if word != DRY_RUN])
    from miles_core.run.prepare import applied, prepare

    plan, catalogue = prepare(config)
    config = applied(config, plan)
    if DRY_RUN in argv:
        from miles_core.contracts.hooks import load_hooks
        from miles_core.plugin.render import describe

        print(describe(plan, load_hooks(plan, catalogue, config).implemented))
        return 0
    for flag, value in (
        ("--hf-checkpoint DIR", config.model.hf_checkpoint),
        ("--prompt-data FILE", config.data.prompt_data),
    ):
        if value is None:
            raise ConfigError(f"miles train needs {flag}; miles demo makes a small model and prompts of its own")
    from miles_core.launch import launch

    return 130 if launch(config, plan, catalogue).run.stop_requested else 0
