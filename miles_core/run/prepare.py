"""Resolves a configuration to an accepted plan, for ``miles train`` and ``miles plan``.

Also validates the plan on a worker: with the same catalogue, the worker's own facts, and the rules that can only be checked there.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from miles_core.config import value
from miles_core.config.effects import find_idle
from miles_core.config.owners import find_enabled
from miles_core.config.policies import CHECKPOINT, PREFIX
from miles_core.config.rules import find_remarks, find_rule_violations
from miles_core.data import hub
from miles_core.errors import ConfigError
from miles_core.mismatch.planned import describe_bounds
from miles_core.plugin.activate import ENVIRONMENT, SIDES
from miles_core.plugin.check import check
from miles_core.plugin.conflicts import BASE
from miles_core.plugin.detect import gpu_facts, model_facts, override
from miles_core.plugin.discovery import Catalogue, discover
from miles_core.plugin.facts import Fact, Facts, State, defined_facts
from miles_core.plugin.installed import package_facts
from miles_core.plugin.plan import Plan, Setting, plain
from miles_core.plugin.resolve import resolve

if TYPE_CHECKING:
    from miles_core.config.config import Config


log = logging.getLogger(__name__)


def catalogue_for(config: Config) -> Catalogue:
    """Return the installed plugins and the single-file plugins that this configuration names.

    Raises:
        PluginError: a requested plugin is not installed, is installed twice or cannot be imported.
    """
    known = config.schema.manifests
    catalogue = known if isinstance(known, Catalogue) else discover()
    for wanted in config.run.plugins:
        catalogue.request(wanted)
    return catalogue


def facts_for(config: Config, given: Sequence[str] = ()) -> Facts:
    """Collect the facts about host, model, packages and options; ``given`` holds ``NAME=VALUE`` overrides for planning.

    Raises:
        CheckpointError: the checkpoint has no readable ``config.json``.
        ConfigError: an override is malformed.
    """
    facts = [*gpu_facts(), *model_facts(config.model.hf_checkpoint), *config.facts(), *_environment_facts(config)]
    facts += [f for m in config.schema.manifests.values() for f in defined_facts(m)]
    for name, own in config.policies.items():
        if (start := own.get(CHECKPOINT)) and start != config.model.hf_checkpoint:
            facts += [dataclasses.replace(f, name=f"{PREFIX}{name}.{f.name}") for f in model_facts(start)]
    manifests = list(config.schema.manifests.values())
    result = override(Facts([*facts, *package_facts(manifests, elsewhere=False)]), given)
    assumed = package_facts(manifests, elsewhere=True) if result.elsewhere else ()
    result = result.with_facts(fact for fact in assumed if not result[fact.name].chosen)
    return result.with_facts(_base_precisions(result))


def _base_precisions(facts: Facts) -> Iterator[Fact]:
    """Yield the default precisions with a corrected origin if the model runs on a CPU, where it computes in float32."""
    on_cpu = facts.value("gpu.count") == 0 or facts.value("model.device") == "cpu"
    if on_cpu and facts.value("model.dtype") == "auto":
        for fact in (facts[side] for side in SIDES if side in facts):
            if fact.value == BASE and not fact.chosen:
                origin = f"{fact.origin}: no number format; without a GPU the model computes in float32"
                yield dataclasses.replace(fact, origin=origin)


def _environment_facts(config: Config) -> Iterator[Fact]:
    """Yield the environment variables that a manifest would set but the user has already set."""
    for path in {
        p for manifest in config.schema.manifests.values() for p in manifest.sets if p.startswith(ENVIRONMENT)
    }:
        name = path.removeprefix(ENVIRONMENT)
        if name in os.environ:
            yield Fact(path, os.environ[name], f"environment variable {name}", chosen=True)


def localise(config: Config, weights: bool = True) -> Config:
    """Replace model names of the Hugging Face hub with local directories, downloading models that are not in the cache.

    Args:
        weights: download the weights too; False for only the files that a plan needs.

    Raises:
        CheckpointError: see ``miles_core.data.hub.model``.
    """
    for path in ("model.hf_checkpoint", "model.ref_load"):
        name, origin = config.get(path), config.origin(path)
        if name is not None and hub.is_model(name):
            local = hub.model(name, config.schema.options[path].flag, weights)
            label = config.model.model_name or name.rpartition("/")[2]
            config = config.replace({path: str(local), "model.model_name": label}, origin=f"{origin}, downloaded")
    named = {name: dict(own) for name, own in config.policies.items()}
    for own in named.values():
        for path in {"model.hf_checkpoint", "model.ref_load"} & own.keys():
            if own[path] is not None and hub.is_model(own[path]):
                own[path] = str(hub.model(own[path], config.schema.options[path].flag, weights))
    return config if named == config.policies else config.with_policies(named)


def prepare(config: Config, given: Sequence[str] = (), catalogue: Catalogue | None = None) -> tuple[Plan, Catalogue]:
    """Resolve a configuration to a plan.

    Args:
        config: result of ``miles_core.config.load``.
        given: fact overrides for planning, ``NAME=VALUE``.
        catalogue: plugins to choose from; by default those installed on this machine.

    Returns:
        the accepted plan, and the catalogue to load its hooks from. The caller applies the plan with ``apply_plan``.

    Raises:
        PlanError: the run cannot start; lists all problems with fixes.
        PluginError, CheckpointError, ConfigError: as in ``catalogue_for`` and ``facts_for``.
    """
    catalogue = catalogue or catalogue_for(config)
    facts = facts_for(config, given)
    plan = resolve(config.requested, catalogue, facts, lambda changed: _judge_change(config, catalogue, changed))
    known = Facts(plan.facts)
    if violations := find_violations(config, known):
        raise ConfigError("; ".join(violations))
    remarks = _collect_remarks({policy: list(find_remarks(known.scope(policy))) for policy in known.policies})
    idle_lines = [*(each.message for each in find_idle(config.schema, known)), *_find_unused_variables(plan)]
    notes = dict.fromkeys([*(f"no effect: {message}" for message in idle_lines), *remarks])
    bounds = dict.fromkeys(
        line for policy in known.policies for line in describe_bounds(known.scope(policy), catalogue)
    )
    reviews = (*plan.reviews, "\n".join(bounds)) if bounds else plan.reviews
    return dataclasses.replace(plan, advice=(*plan.advice, *notes), reviews=reviews), catalogue


def _collect_remarks(found: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the notes of all policies (name -> notes) once; those that do not apply to every policy name their policies."""
    for line in dict.fromkeys(line for lines in found.values() for line in lines):
        having = [policy for policy, lines in found.items() if line in lines]
        yield line if len(having) == len(found) else f"{line} (of {', '.join(having)})"


def _find_unused_variables(plan: Plan) -> Iterator[str]:
    """Yield a sentence for every environment variable of the user that a plugin sets in other runs, but none in this one."""
    used = {setting.path for setting in plan.sets}
    for fact in plan.facts:
        if fact.name.startswith(ENVIRONMENT) and fact.chosen and fact.name not in used:
            yield f"{fact.origin}={fact.value}: no plugin of this run uses it with these options"


def _judge_change(config: Config, catalogue: Catalogue, changed: Facts) -> Iterator[str]:
    """Yield what prevents a run with these facts of a proposed change: violations, and problems of plugins that its options would enable again
    or in addition (``--schedule offline`` enables ``offline``), which the change alone does not activate."""
    yield from find_violations(config, changed)
    active = [name for name in catalogue if changed.value(f"plugin.{name}")]
    added = {name for name in find_enabled(config.schema, changed, active) if name in catalogue} - {*active}
    if added:
        yield from (problem.headline for problem in check([*active, *added], catalogue, changed).problems)


def find_violations(config: Config, facts: Facts) -> list[str]:
    """Return the violations of option types, bounds, core's rules and conditions of effect (``only_if``) by these facts, whose values may be
    set by plugins or proposed by a fix."""
    problems = []
    for fact in facts.values():
        option = config.schema.find(fact.name)
        if option is not None and fact.state is State.KNOWN and fact.value != plain(config.get(option.path)):
            try:
                value.check(option, fact.value, f"{fact.name} {fact.origin}")
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        return problems
    idle = [each.message for each in find_idle(config.schema, facts) if not each.harmless]
    return list(dict.fromkeys([*find_rule_violations(facts), *idle]))


def apply_plan(config: Config, plan: Plan) -> Config:
    """Return ``config`` with the plan's plugins activated and the values that they set."""
    return apply_sets(config.with_plugins(plan.order), plan.sets)


def apply_sets(config: Config, sets: Iterable[Setting]) -> Config:
    """Return ``config`` with the values that plugins set."""
    for setting in sets:
        if not setting.path.startswith(ENVIRONMENT):
            config = config.replace({setting.path: setting.value}, origin=f"set by {setting.plugin}")
    return config


def set_environment(plan: Plan) -> None:
    """Set the environment variables of the plan in this process. Call it before parts are built."""
    for setting in plan.sets:
        if setting.path.startswith(ENVIRONMENT):
            os.environ[setting.path.removeprefix(ENVIRONMENT)] = str(setting.value)
            log.info("%s=%s (set by %s)", setting.path.removeprefix(ENVIRONMENT), setting.value, setting.plugin)


def accept(plan: Plan) -> Catalogue:
    """Validate the driver's plan in a worker process and set its environment variables.

    Returns:
        the catalogue to load the plan's hooks from.

    Raises:
        PlanError: the installed versions differ from the driver's, or a rule does not hold on this worker.
        PluginError: a plugin cannot be imported on this worker.
        CheckpointError: the checkpoint cannot be read on this worker.
    """
    catalogue = discover()
    for path in plan.files:
        catalogue.add_file(path)
    set_environment(plan)
    plan.check_installed(catalogue)
    plan.check_deferred([*gpu_facts(), *model_facts(plan.fact("model.hf_checkpoint"))])
    return catalogue
