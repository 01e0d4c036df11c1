"""Check whether a run with the given plugins and facts can work.

The checker evaluates all rules, capabilities, precision pairs, claims and order constraints and reports all violations at once. It
does not search: an environment has one version of each plugin, and the user names the plugins to use.
``miles_core.plugin.activate`` determines the active plugins first; ``miles_core.plugin.fixes`` then tries changes and suggests
those that this checker accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from miles_core.nearest import did_you_mean
from miles_core.plugin.activate import BACKENDS, SIDES, Activation, activate, backends_of, plugins_needed, provider
from miles_core.plugin.conflicts import BASE, claims, collisions, order, precision
from miles_core.plugin.core import CORE, NEEDS
from miles_core.plugin.facts import COMES_WITH, PACKAGE, Facts, State
from miles_core.plugin.installed import ASSUMED, package_fact
from miles_core.plugin.manifest import Plugin, Rule
from miles_core.plugin.memory import Usage, review_memory
from miles_core.plugin.model_config import MOST_LAYERS, model_config
from miles_core.plugin.plan import Active, Deferred, HookTarget, Plan, Setting, plain
from miles_core.plugin.problem import Problem, Review, describe_fact
from miles_core.plugin.rule import RuleError, Truth, UnknownFact, conjuncts, evaluate, names, parse
from miles_core.version import __version__

#: Kinds of parts for which no option selects a name.
UNNAMED = ("model", "decoder")


@dataclass
class CheckResult:
    """The result of one check: the active plugins, and all problems and notes."""

    activation: Activation
    manifests: Mapping[str, Plugin]
    problems: list[Problem] = field(default_factory=list)
    deferred: list[Deferred] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    waived: list[str] = field(default_factory=list)
    reviews: list[str] = field(default_factory=list)
    hooks: list[HookTarget] = field(default_factory=list)
    order: tuple[str, ...] = ()
    consulted: set[str] = field(default_factory=lambda: {*BACKENDS, *SIDES})

    @property
    def facts(self) -> Facts:
        """All facts, including values set by plugins."""
        return self.activation.facts

    @property
    def sets(self) -> tuple[Setting, ...]:
        """The values that plugins set."""
        return tuple(Setting(s.path, plain(s.value), s.plugin) for s in self.activation.sets)

    def plan(self) -> Plan:
        """Return the accepted plan. Valid only if there are no problems."""
        active, sources = self.activation.active, getattr(self.manifests, "sources", {})
        because = self.activation.because
        facts = sorted((replace(f, value=plain(f.value)) for f in self.facts.values()), key=lambda f: f.name)
        rank = {name: i for i, name in enumerate([*self.order, "core"])}
        return Plan(
            core=__version__,
            plugins=tuple(Active(n, active[n].version, sources.get(n, ""), because[n]) for n in self.order),
            facts=tuple(facts),
            consulted=tuple(sorted(self.consulted)),
            sets=self.sets,
            hooks=tuple(sorted(self.hooks, key=lambda h: rank[h.plugin])),
            deferred=tuple(dict.fromkeys(self.deferred)),
            advice=tuple(dict.fromkeys(self.advice)),
            waived=tuple(dict.fromkeys(self.waived)),
            reviews=tuple(self.reviews),
        )


def check(requested: Sequence[str] | Mapping[str, str], manifests: Mapping[str, Plugin], facts: Facts) -> CheckResult:
    """Find all problems of a run, without searching for fixes."""
    reasons = requested if isinstance(requested, Mapping) else dict.fromkeys(requested, "--plugins")
    activation = activate(reasons, manifests, facts)
    active = activation.active
    result = CheckResult(activation, manifests)
    result.problems += activation.problems
    for plugin in active.values():
        _check_version(result, plugin)
        _check_packages(result, plugin)
        for rule in plugin.requires:
            _check_rule(result, plugin.name, rule, result.facts)
        for rule in plugin.recommends:
            _collect_advice(result, plugin.name, rule, result.facts)
        _collect_notes(result, plugin)
        _check_uses(result, plugin)
        _collect_hooks(result, plugin)
    _run_reviews(result)
    _check_inactive_options(result, facts)
    _check_warm_up(result)
    _check_core_needs(result)
    _check_unnamed_parts(result)
    _check_backends(result)
    _check_transport(result)
    for policy in result.facts.policies:
        scope, who = result.facts.scope(policy), f" of {policy}" if len(result.facts.policies) > 1 else ""
        _check_formats(result, scope)
        cell, problems, advice = precision(active, manifests, scope, who)
        result.problems += [*problems, *claims(active, scope, who)]
        result.advice += advice
        if cell is not None:
            name = f"{cell.rollout} rollout x {cell.train} train{who}"
            for rule in cell.rules:
                _check_rule(result, name, rule, scope)
            for rule in cell.recommends:
                _collect_advice(result, name, rule, scope)
    result.problems += collisions(active)
    result.order, problems = order(active)
    result.problems += problems
    return result


def _check_rule(result: CheckResult, who: str, rule: Rule, facts: Facts) -> None:
    """Evaluate one rule and record a problem, a waived rule, or a rule deferred to the workers."""
    try:
        when = evaluate(rule.when, facts.lookup)
        if when in (Truth.FALSE, Truth.VACUOUS):
            return
        needs = evaluate(rule.needs, facts.lookup)
    except UnknownFact as error:
        because = "; ".join(filter(None, ("no part of this run defines it", error.hint)))
        result.problems.append(Problem(who, f"{rule.needs!r} names {error.name}", because, verb="has a broken rule:"))
        return
    except RuleError as error:
        result.problems.append(Problem(who, str(error), rule.because, verb="has a broken rule:"))
        return
    involved = [*names(parse(rule.needs)), *(names(parse(rule.when)) if rule.when else ())]
    result.consulted.update(involved)
    values = tuple(describe_fact(facts.lookup(n)) for n in dict.fromkeys(involved))
    unknown = needs is Truth.UNKNOWN or (needs is Truth.FALSE and when is Truth.UNKNOWN)
    if rule.hardware and facts.value("precision.emulated") is True:
        if needs is not Truth.TRUE:
            name, value, origin = values[0]
            result.waived.append(f"{who} needs {rule.needs} for speed; here {name} = {value} ({origin})")
    elif unknown or (needs is Truth.TRUE and any(n.partition(".")[0] == "gpu" for n in involved)):
        result.deferred.append(Deferred(who, rule.needs, rule.because, rule.when, holds_here=not unknown))
    elif needs is Truth.FALSE:
        result.problems.append(Problem(who, rule.needs, rule.because, values, choices=tuple(involved)))


def _collect_advice(result: CheckResult, who: str, rule: Rule, facts: Facts) -> None:
    """Record advice if a recommendation applies and is not followed."""
    try:
        if evaluate(rule.when, facts.lookup) is not Truth.TRUE or evaluate(rule.needs, facts.lookup) is not Truth.FALSE:
            return
    except RuleError as error:
        result.problems.append(Problem(who, str(error), rule.because, verb="has a broken recommendation:"))
        return
    plugins = plugins_needed(rule)
    wanted = f"--plugins {','.join(plugins)}" if len(plugins) == len(conjuncts(parse(rule.needs))) else rule.needs
    result.advice.append(f"{who} recommends {wanted}: {rule.because}")


def _collect_notes(result: CheckResult, plugin: Plugin) -> None:
    """Record the plugin's notes whose condition holds."""
    for condition, sentence in plugin.notes.items():
        try:
            if evaluate(condition, result.facts.lookup) is Truth.TRUE:
                result.advice.append(f"{plugin.name}: {sentence}")
        except RuleError as error:
            result.problems.append(Problem(plugin.name, repr(condition), str(error), verb="has a broken note:"))


def _check_version(result: CheckResult, plugin: Plugin) -> None:
    """Check the range of core versions that a plugin supports. ``--no-deps`` and editable installs bypass pip's own check."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        fits = plugin.core == CORE.core or SpecifierSet(plugin.core).contains(__version__, prereleases=True)
    except InvalidSpecifier:
        because = f"write a version specifier such as '~={__version__}'"
        result.problems.append(Problem(plugin.name, repr(plugin.core), because, verb="has a broken core range:"))
        return
    if not fits:
        values = (("miles-core", __version__, "installed"),)
        because = f"{plugin.name} {plugin.version} supports only those versions; install a matching one"
        result.problems.append(Problem(plugin.name, f"miles-core {plugin.core}", because, values))


def _check_packages(result: CheckResult, plugin: Plugin) -> None:
    """Check the packages that a plugin needs; otherwise a missing one would fail only while the run is built."""
    for package in plugin.packages:
        try:
            if evaluate(package.when, result.facts.lookup) is not Truth.TRUE:
                continue
        except RuleError as error:
            result.problems.append(
                Problem(plugin.name, f"{package.name}: {error}", package.install, verb="has a broken package:")
            )
            continue
        needs = f"{package.name} {package.versions}".strip()
        fact = result.facts.get(f"{PACKAGE}.{package.name}") or package_fact(package, elsewhere=False)
        if fact.value == ASSUMED:
            result.consulted.add(fact.name)
            verb = "uses" if package.without else "needs"
            result.advice.append(f"{plugin.name} {verb} {needs} where the run starts: {package.install}")
        elif package.without and fact.value in (None, "none"):
            result.consulted.add(fact.name)
            result.advice.append(f"{plugin.name}: without {needs} {package.without}; {package.install}")
        elif not package.fits(fact.value):
            state = "is not installed" if fact.value in (None, "none") else "has another version"
            because = f"{package.name} {state}: {package.install}"
            choices = tuple(names(parse(package.when))) if package.when else ()
            result.problems.append(Problem(plugin.name, needs, because, (describe_fact(fact),), choices=choices))


def _check_uses(result: CheckResult, plugin: Plugin) -> None:
    """Check that the selected backends have all capabilities that a plugin uses."""
    for wanted, reason in plugin.uses.items():
        kinds, capability = backends_of(wanted, result.manifests)
        if not kinds:
            every = [*result.manifests.values(), CORE]
            everything = {c.name for m in every for kind in m.capabilities for c in m.list_capabilities(kind)}
            because = did_you_mean(capability, everything) or reason
            result.problems.append(Problem(plugin.name, f"capability {wanted}, which no backend has", because))
        for kind in kinds:
            _check_capability(result, plugin.name, kind, capability, reason)


def _check_capability(result: CheckResult, who: str, kind: str, capability: str, reason: str, *asking: str) -> None:
    """Check that the selected backend of a kind has a capability. asking: further options that a fix may change."""
    backend = result.facts.lookup(kind)
    owner = provider(kind, backend.value, result.manifests)
    if owner is None:
        return
    declared = owner.capability(kind, capability)
    needs = f"the {kind} capability {capability}"
    if declared is None:
        has = ", ".join(c.name for c in owner.list_capabilities(kind)) or "none"
        values = (describe_fact(backend), (f"capabilities of {backend.value}", has, f"manifest of {owner.name}"))
        result.problems.append(Problem(who, needs, reason, values, choices=(kind, *asking)))
    elif declared.when:
        because = f"{backend.value} has {capability} only when {declared.when}; {reason}"
        _check_rule(result, who, Rule(declared.when, because), result.facts)


def _check_formats(result: CheckResult, facts: Facts) -> None:
    """Check that the backends declare the number formats of one policy. At its start the run compares their quantisers with the format
    (``miles_core.mismatch.parity``) and would stop at a backend without one."""
    for kind, side in zip(BACKENDS, SIDES, strict=False):
        name = facts.value(side)
        if name != BASE and provider("format", name, result.manifests) is not None:
            reason = f"it must round {name} weights and activations as the other side does"
            _check_capability(result, f"{side} {name}", kind, f"format:{name}", reason, side)


def _check_warm_up(result: CheckResult) -> None:
    """Check that every backend with a number format can change its precision if there is a precision warm-up."""
    steps = result.facts.lookup("precision.warmup_steps")
    if steps.state is not State.KNOWN or not steps.value:
        return
    for kind, side in zip(BACKENDS, SIDES, strict=False):
        if result.facts.value(side) != BASE:
            reason = (
                f"after {steps.value} optimiser steps it changes its precision while the run goes on ({steps.origin})"
            )
            _check_capability(result, f"a warm-up to {side} {result.facts.value(side)}", kind, "rebuild", reason)


def _check_core_needs(result: CheckResult) -> None:
    """Check the backend capabilities that core's options need."""
    for need in NEEDS:
        asking = names(parse(need.when))
        if all(name in result.facts for name in asking) and evaluate(need.when, result.facts.lookup) is Truth.TRUE:
            _check_capability(result, need.who, need.kind, need.capability, need.because)


def _check_unnamed_parts(result: CheckResult) -> None:
    """Check parts of the kinds in ``UNNAMED``, of which a run uses at most one.

    A backend uses a kind of part if its own plugin provides one. If a backend uses the kind, a second plugin part is a problem; if
    no backend uses it, a part is reported as unused.
    """
    owners = [provider(kind, result.facts.value(kind), result.manifests) for kind in ("engine", "trainer")]
    for kind in UNNAMED:
        is_used = any(owner is not None and kind in owner.provides for owner in owners)
        mine = [p for p in result.activation.active.values() if kind in p.provides and p not in owners]
        for plugin in mine[1:] if is_used else ():
            because = f"a run has one {kind}, and {mine[0].name} also provides one: leave one of them out of --plugins"
            result.problems.append(Problem(plugin.name, f"a second {kind}", because, verb="brings"))
        for plugin in () if is_used else mine:
            where = " and ".join(str(result.facts.lookup(k)) for k in ("engine", "trainer"))
            result.advice.append(f"{plugin.name}: its part {kind} is not used; {where} take none")


def _check_transport(result: CheckResult) -> None:
    """Check that the engine supports the transport's messages, if the transport declares any."""
    fact = result.facts.lookup("transport")
    owner = provider("transport", fact.value, result.manifests)
    if owner is not None and owner.capability("transport", str(fact.value)) is not None:
        reason = "an engine that does not support its messages cannot receive weights"
        _check_capability(result, f"the transport {fact.value}", "engine", f"transport:{fact.value}", reason)


def _collect_hooks(result: CheckResult, plugin: Plugin) -> None:
    """Record the hook classes whose condition holds. Workers decide conditions that are unknown on this host."""
    for condition, targets in plugin.hooks.items():
        try:
            truth = evaluate(condition, result.facts.lookup)
        except RuleError as error:
            result.problems.append(
                Problem(plugin.name, repr(condition), str(error), verb="has a broken hooks condition:")
            )
            continue
        result.consulted.update(names(parse(condition)) if condition else ())
        if truth in (Truth.TRUE, Truth.UNKNOWN):
            for target in (targets,) if isinstance(targets, str) else targets:
                result.hooks.append(HookTarget(plugin.name, target, condition, deferred=truth is Truth.UNKNOWN))


def _run_reviews(result: CheckResult) -> None:
    """Run the plugins' ``review`` functions and check GPU memory. Facts that their problems name count as consulted."""
    layers = result.facts.lookup("model.layers")
    if isinstance(layers.value, int) and layers.value > MOST_LAYERS:
        because = "no model has so many layers, and planning enumerates them; correct the number in config.json"
        result.problems.append(
            Problem("this run", f"at most {MOST_LAYERS:,} layers", because, (describe_fact(layers),))
        )
        return
    checkpoint = result.facts.value("model.hf_checkpoint")
    model = model_config(checkpoint)
    if model is None and checkpoint:
        result.reviews.append(
            f"warning: sizes and memory are not checked, because {checkpoint} is neither a directory nor in the local hub cache; "
            f"its config.json is enough: hf download {checkpoint} config.json"
        )
    usages: list[Usage] = []
    for plugin in result.activation.active.values():
        if plugin.review:
            review: Review = _import_function(plugin.review)(result.facts, model)
            result.reviews += review.notes
            result.problems += review.problems
            result.consulted.update(n for p in review.problems for n in p.choices)
        if plugin.memory and model is not None:
            usages += _import_function(plugin.memory)(result.facts, model)
    notes, problems = review_memory(usages, result.facts)
    result.reviews += notes
    result.problems += problems


def _import_function(target: str) -> Callable[..., Any]:
    """Import a function named as ``module:function``."""
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _check_inactive_options(result: CheckResult, facts: Facts) -> None:
    """Report options set by the user for plugins that are not active, which would have no effect.

    A flag shared with an active plugin is accepted.
    """
    active = result.activation.active
    others = {name for name, plugin in result.manifests.items() if name not in active and not plugin.standard}
    given = [(fact.name.partition(".")[0], fact) for fact in facts.values() if fact.chosen]
    inactive = [(owner, fact) for owner, fact in given if owner in others]
    known = result.facts.values() if inactive else ()
    shared = {fact.flag for fact in known if fact.flag and fact.name.partition(".")[0] in active}
    for owner, fact in inactive:
        # a switch that is off needs no plugin
        if fact.value is not None and fact.value is not False and fact.flag not in shared:
            because = f"{fact.name} belongs to {owner}, which is not active: add it with --plugins {owner}"
            result.problems.append(Problem(fact.origin, f"plugin.{owner}", because, (describe_fact(fact),)))


def _check_backends(result: CheckResult) -> None:
    """Check that plugins provide the selected engine, trainer and runtime."""
    for kind in BACKENDS:
        fact = result.facts.lookup(kind)
        named = fact.state is State.KNOWN and fact.value  # empty if no backend is installed
        if named and provider(kind, fact.value, result.manifests) is None:
            known = {n for m in [*result.manifests.values(), CORE] for n in m.provides.get(kind, {})}
            hint = did_you_mean(str(fact.value), known) or COMES_WITH
            because = f"installed plugins provide {', '.join(sorted(known))}; {hint}"
            result.problems.append(
                Problem("this run", f"a {kind} {fact.value!r}", because, (describe_fact(fact),), choices=(kind,))
            )
