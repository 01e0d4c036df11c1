"""Checks of a run's inputs before the model is loaded; all problems are reported together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from miles_core.checkpoint.directory import locate_checkpoint
from miles_core.checkpoint.placed import is_occupied, staging_path
from miles_core.config.config import Config
from miles_core.contracts.run import Run
from miles_core.errors import ConfigError, PlanError
from miles_core.plugin.discovery import Catalogue
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Plan
from miles_core.run.directory import refuse_to_overwrite, refuse_unusable_run, refuse_unwritable, run_directory
from miles_core.run.inputs import Inputs
from miles_core.run.make import make_run
from miles_core.run.model_check import check_model
from miles_core.run.prepare import apply_plan, apply_sets, localise, prepare
from miles_core.run.problems import Problems


def plan_run(given: Config) -> tuple[Config, Plan, Catalogue]:
    """Resolve a user's configuration: download the models it names, resolve its plan and apply the plan's settings.

    Returns:
        the effective configuration, the accepted plan, and the catalogue of plugins.

    Raises:
        ConfigError: ``--load`` names no run whose options could be continued.
        PlanError: the plan is rejected; the message includes problems with the inputs.
        MilesError: see ``localise`` and ``prepare``.
    """
    refuse_unusable_run(given)
    config = localise(given, weights=False)
    try:
        plan, catalogue = prepare(config)
    except PlanError as error:
        problems = Problems()
        _inputs(apply_sets(config, error.sets), problems)
        if not problems.messages:
            raise
        also = "\n".join(f"  - {message}" for message in problems.messages)
        raise PlanError(f"{error}\n\nand, independent of the plan:\n{also}", error.problems) from error
    return apply_plan(config, plan), plan, catalogue


def check_start(config: Config, plan: Plan, manifests: Mapping[str, Plugin], weights: bool = True) -> Run:
    """Check whether the run would start (``--dry-run``): its inputs (see ``check_inputs``), its directory and the checkpoint it
    continues. Creates and writes nothing.

    Args:
        weights: require the model's weights; False if the run would download them.

    Raises:
        MilesError: all problems together.
    """
    problems = Problems()
    with problems():
        refuse_to_overwrite(config)
        refuse_unwritable(f"--save {run_directory(config)}", run_directory(config))
    with problems():
        if config.run.load is not None:
            locate_checkpoint(config.run.load, plan.record())
    run, _ = check_inputs(config, plan, manifests, run_directory(config), problems, weights)
    return run


def check_inputs(
    config: Config,
    plan: Plan,
    manifests: Mapping[str, Plugin],
    directory: Path,
    problems: Problems | None = None,
    weights: bool = True,
) -> tuple[Run, Inputs]:
    """Create the run of an accepted plan and its inputs, and check both. Builds no parts and writes nothing.

    Args:
        config, plan, manifests: as for ``launch``.
        directory: the run directory.
        problems: problems detected earlier, reported with the others.
        weights: as for ``check_start``.

    Raises:
        MilesError: all problems together: with files, keys, prompts, functions, the tokenizer, the headers of the weights, the
            export directory, or a missing package that an option needs.
    """
    problems = problems or Problems()
    with problems():
        check_model(config, plan, manifests, weights)
    run = None
    if config.model.hf_checkpoint is not None:
        with problems():
            run = make_run(config, plan, manifests, directory)
    inputs = _inputs(config, problems)
    if run is not None:
        inputs.check(run, problems)
    problems.raise_all()
    assert run is not None  # otherwise a problem was raised
    return run, inputs


def _inputs(config: Config, problems: Problems) -> Inputs:
    """Open a run's inputs and perform the checks that need no plan; collect errors in ``problems``."""
    for flag, value in (
        ("--hf-checkpoint DIR", config.model.hf_checkpoint),
        ("--prompt-data FILE", config.data.prompt_data),
    ):
        with problems():
            if value is None and (config.data.prompts == "file" or flag != "--prompt-data FILE"):
                raise ConfigError(f"miles train needs {flag}; miles demo creates a small model and prompts itself")
    with problems():
        _check_export(config)
    return Inputs(config, problems)


def _check_export(config: Config) -> None:
    """Raise ConfigError if ``--export-hf`` cannot be written. The export happens after the last step, when a failure costs most."""
    if config.run.export_hf is None:
        return
    given, target = config.run.export_hf, Path(os.path.realpath(config.run.export_hf))
    refuse_unwritable(f"--export-hf {given}", Path(given))
    if is_occupied(target, staging_path(target, "exporting")):
        raise ConfigError(f"--export-hf {given}: it already exists and is not empty; choose another directory")
    if config.model.hf_checkpoint and target.is_relative_to(Path(config.model.hf_checkpoint).resolve()):
        raise ConfigError(f"--export-hf {given}: it is inside --hf-checkpoint; choose another directory")
