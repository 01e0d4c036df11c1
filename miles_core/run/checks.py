"""What is cheap to check and often wrong: looked at before the model is loaded, and told together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from miles_core.checkpoint.directory import locate_checkpoint, run_of
from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.checkpoint.placed import is_occupied, staging_path
from miles_core.config.config import Config
from miles_core.contracts.run import Run
from miles_core.errors import CheckpointError, ConfigError, PlanError
from miles_core.plugin.activate import provider
from miles_core.plugin.discovery import Catalogue
from miles_core.plugin.load import import_target, select_arguments
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Plan
from miles_core.run.directory import refuse_to_overwrite, refuse_unwritable, run_directory
from miles_core.run.inputs import Inputs
from miles_core.run.make import make_run
from miles_core.run.prepare import applied, localised, prepare
from miles_core.run.problems import Problems

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
#: switch -> the packages it imports.
_PACKAGES = {"use_wandb": ("--use-wandb", "wandb"), "use_tensorboard": ("--use-tensorboard", "tensorboard")}


def planned(given: Config) -> tuple[Config, Plan, Catalogue]:
    """The one way from what a user gave to a run: its models by name found, its plan accepted, what the plan sets applied.

    Raises:
        PlanError: the plan is refused; what is wrong with the inputs is told with it.
        MilesError: see ``localised`` and ``prepare``.
    """
    config = localised(given, weights=False)
    try:
        plan, catalogue = prepare(config)
    except PlanError as error:
        problems = Problems()
        _inputs(config, problems)
        if not problems.found:
            raise
        also = "\n".join(f"  - {sentence}" for sentence in problems.found)
        raise PlanError(f"{error}\n\nand, whatever the plan is:\n{also}", error.problems) from error
    return applied(config, plan), plan, catalogue


def check_start(config: Config, plan: Plan, manifests: Mapping[str, Plugin], weights: bool = True) -> Run:
    """What ``--dry-run`` asks: would this run start? The checks of ``checked``, its directory and the checkpoint it continues;
    nothing is made or written.

    Args:
        weights: the model's must be there; False while it is a name whose weights the run would download.

    Raises:
        MilesError: all that is wrong, together.
    """
    problems = Problems()
    with problems():
        refuse_to_overwrite(config)
        refuse_unwritable(f"--save {run_directory(config)}", run_directory(config))
    with problems():
        if config.run.load is not None:
            locate_checkpoint(config.run.load, plan.record())
    run, _ = checked(config, plan, manifests, run_directory(config), problems, weights)
    return run


def checked(
    config: Config,
    plan: Plan,
    manifests: Mapping[str, Plugin],
    directory: Path,
    problems: Problems | None = None,
    weights: bool = True,
) -> tuple[Run, Inputs]:
    """The run that an accepted plan describes and what it reads beside its model; nothing is built and nothing written.

    Args:
        config, plan, manifests: as for ``launch``.
        directory: the run's.
        problems: what is wrong already, told with the rest.
        weights: as for ``check_start``.

    Raises:
        MilesError: files, keys, prompts, functions, the tokenizer, the weights' headers, the export directory or a package that a
            switch needs are not what the run needs: all of it at once.
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
    problems.told()
    assert run is not None  # or there was a problem
    return run, inputs


def _inputs(config: Config, problems: Problems) -> Inputs:
    """What a run reads, and where it writes, as far as no plan is needed to look at it."""
    load = config.run.load
    for flag, value in (
        ("--hf-checkpoint DIR", config.model.hf_checkpoint),
        ("--prompt-data FILE", config.data.prompt_data),
    ):
        with problems():
            if value is None and load is not None and not (run_of(load) / "config.yaml").is_file():
                raise ConfigError(
                    f"--load {load}: it holds no config.yaml, so it is no run directory, or a part of one; give the directory that a run "
                    "was saved in, or all flags of that run"
                )
            if value is None and (config.data.prompts == "file" or flag != "--prompt-data FILE"):
                raise ConfigError(f"miles train needs {flag}; miles demo makes a small model and prompts of its own")
    with problems():
        _check_export(config)
    for name, (flag, package) in _PACKAGES.items():
        with problems():
            if getattr(config.run, name) and find_spec(package) is None:
                raise ConfigError(
                    f"{flag} needs the package {package!r}, which is not installed: pip install {package}"
                )
    return Inputs(config, problems)


def check_model(config: Config, plan: Plan, manifests: Mapping[str, Plugin], weights: bool) -> None:
    """Check the headers of the weights: all are there, and every plugin with an ``examine`` function accepts them.

    Args:
        weights: they must be there.

    Raises:
        CheckpointError, ConfigError: they are not, or they cannot.
    """
    _check_weights(config, plan)
    standard = [plugin for plugin in manifests.values() if plugin.standard]
    for plugin in [*_builders(plan, manifests), *standard]:
        if plugin.examine:
            examine = import_target(plugin.name, plugin.examine)
            examine(**select_arguments(examine, {"config": config, "weights": weights, "manifests": manifests}))


def _builders(plan: Plan, manifests: Mapping[str, Plugin]) -> list[Plugin]:
    """Who makes models of the checkpoint: the plugin that provides them, and the one of a trainer that has a model of its own."""
    models = next((p for name in plan.order if (p := manifests[name]).provides.get("model")), None)
    trains = provider("trainer", plan.fact("trainer"), manifests)
    own = trains if trains is not None and not trains.provides.get("model") else None
    return [p for p in (models, own) if p is not None]


def _check_weights(config: Config, plan: Plan) -> None:
    """The weight files are there, whole, and hold the layers that config.json says (a smaller number would be trained, and
    exported, without the others)."""
    directory = Path(config.model.ref_load or config.model.hf_checkpoint or "")
    if not config.model.hf_checkpoint or not any(directory.glob("*.safetensors*")):
        return  # no directory, or weights of another kind: the backend's to say
    flag = "--ref-load" if config.model.ref_load else "--hf-checkpoint"
    files = CheckpointFiles(directory, flag)
    held = {int(found[1]) for name in files.entries if (found := _LAYER.search(name))}
    said = plan.fact("model.layers")
    if said is not None and held and max(held) + 1 > int(said) + int(plan.fact("model.mtp_layers") or 0):
        raise CheckpointError(
            f"{flag} {directory}: config.json says {said} layers and the weights hold {max(held) + 1}; the others would not "
            "be trained or exported: put the number right in config.json"
        )


def _check_export(config: Config) -> None:
    """``--export-hf`` can be written: it is written after the last step, when a refusal costs most."""
    if config.run.export_hf is None:
        return
    given, target = config.run.export_hf, Path(os.path.realpath(config.run.export_hf))
    refuse_unwritable(f"--export-hf {given}", Path(given))
    if is_occupied(target, staging_path(target, "exporting")):
        raise ConfigError(f"--export-hf {given}: it already exists and is not empty; choose another directory")
    if config.model.hf_checkpoint and target.is_relative_to(Path(config.model.hf_checkpoint).resolve()):
        raise ConfigError(f"--export-hf {given}: it lies inside of --hf-checkpoint; choose another directory")
