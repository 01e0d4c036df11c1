"""The checker: are these plugins, on these facts, a run that can work?

There is nothing to search for (an environment has one version of each plugin, and the user named the ones to use), so
this checks and explains: every rule, capability, precision cell, claim and order, all violations at once.
``miles_core.plugin.activate`` decides before it who takes part; ``miles_core.plugin.fixes`` afterwards tries changes
and keeps those this checker accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from miles_core.nearest import did_you_mean
from miles_core.plugin.activate import BACKENDS, SIDES, Activation, activate, backends_of, provider
from miles_core.plugin.conflicts import BASE, claims, collisions, order, precision
from miles_core.plugin.core import CORE, NEEDS
from miles_core.plugin.facts import COMES_WITH, PACKAGE, Facts, State
from miles_core.plugin.installed import ASSUMED, installed
from miles_core.plugin.manifest import Plugin, Rule
from miles_core.plugin.memory import Usage, review_memory
from miles_core.plugin.model_config import MOST_LAYERS, model_config
from miles_core.plugin.plan import Active, Deferred, HookTarget, Plan, Setting, plain
from miles_core.plugin.problem import Problem, Review, described
from miles_core.plugin.rule import Compare, RuleError, Truth, UnknownFact, conjuncts, evaluate, names, parse
from miles_core.version import __version__

#: Kinds of parts that no option chooses among.
UNNAMED = ("model", "decoder")


@dataclass
class Checked:
    """One check: who takes part and what was found."""

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
        """Every fact, what plugins set included."""
        return self.activation.facts

    def plan(self) -> Plan:
        """The accepted plan; meaningful without problems."""
        active, sources = self.activation.active, getattr(self.manifests, "sources", {})
        because = self.activation.because
        facts = sorted((replace(f, value=plain(f.value)) for f in self.facts.values()), key=lambda f: f.name)
        rank = {name: i for i, name in enumerate([*self.order, "core"])}
        return Plan(
            core=__version__,
            plugins=tuple(Active(n, active[n].version, sources.get(n, ""), because[n]) for n in self.order),
            facts=tuple(facts),
            consulted=tuple(sorted(self.consulted)),
            sets=tuple(Setting(s.path, plain(s.value), s.plugin) for s in self.activation.sets),
            hooks=tuple(sorted(self.hooks, key=lambda h: rank[h.plugin])),
            deferred=tuple(dict.fromkeys(self.deferred)),
            advice=tuple(dict.fromkeys(self.advice)),
            waived=tuple(dict.fromkeys(self.waived)),
            reviews=tuple(self.reviews),
        )


def check(requested: Sequence[str] | Mapping[str, str], manifests: Mapping[str, Plugin], facts: Facts) -> Checked:
    """Everything wrong with a run, without looking for fixes."""
    reasons = requested if isinstance(requested, Mapping) else dict.fromkeys(requested, "--plugins")
    activation = activate(reasons, manifests, facts)
    active = activation.active
    checked = Checked(activation, manifests)
    checked.problems += activation.problems
    for plugin in active.values():
        _version(checked, plugin)
        _packages(checked, plugin)
        for rule in plugin.requires:
            _rule(checked, plugin.name, rule, checked.facts)
        for rule in plugin.recommends:
            _advise(checked, plugin.name, rule, checked.facts)
        _notes(checked, plugin)
        _uses(checked, plugin)
        _hooks(checked, plugin)
    _reviews(checked)
    _orphans(checked, facts)
    _warm_up(checked)
    _core_needs(checked)
    _unused(checked)
    _backends(checked)
    _transport(checked)
    for policy in checked.facts.policies:
        scope, who = checked.facts.scope(policy), f" of {policy}" if len(checked.facts.policies) > 1 else ""
        cell, problems, advice = precision(active, manifests, scope, who)
        checked.problems += [*problems, *claims(active, scope, who)]
        checked.advice += advice
        if cell is not None:
            name = f"{cell.rollout} rollout x {cell.train} train{who}"
            for rule in cell.rules:
                _rule(checked, name, rule, scope)
            for rule in cell.recommends:
                _advise(checked, name, rule, scope)
    checked.problems += collisions(active)
    checked.order, problems = order(active)
    checked.problems += problems
    return checked


def _rule(checked: Checked, who: str, rule: Rule, facts: Facts) -> None:
    """Sort one rule into met, broken, waived or left for the workers."""
    try:
        when = evaluate(rule.when, facts.lookup)
        if when in (Truth.FALSE, Truth.VACUOUS):
            return
        needs = evaluate(rule.needs, facts.lookup)
    except UnknownFact as error:
        because = error.hint or "no part of this run defines it"
        checked.problems.append(Problem(who, f"{rule.needs!r} names {error.name}", because, verb="has a broken rule:"))
        return
    except RuleError as error:
        checked.problems.append(Problem(who, str(error), rule.because, verb="has a broken rule:"))
        return
    involved = [*names(parse(rule.needs)), *(names(parse(rule.when)) if rule.when else ())]
    checked.consulted.update(involved)
    values = tuple(described(facts.lookup(n)) for n in dict.fromkeys(involved))
    unknown = needs is Truth.UNKNOWN or (needs is Truth.FALSE and when is Truth.UNKNOWN)
    if rule.hardware and facts.value("precision.emulated") is True:
        if needs is not Truth.TRUE:
            name, value, origin = values[0]
            checked.waived.append(f"{who} needs {rule.needs} for speed; here {name} = {value} ({origin})")
    elif unknown or (needs is Truth.TRUE and any(n.partition(".")[0] == "gpu" for n in involved)):
        checked.deferred.append(Deferred(who, rule.needs, rule.because, rule.when, holds_here=not unknown))
    elif needs is Truth.FALSE:
        checked.problems.append(Problem(who, rule.needs, rule.because, values, choices=tuple(involved)))


def _advise(checked: Checked, who: str, rule: Rule, facts: Facts) -> None:
    """Print a recommendation that holds and is not followed; never enforce it."""
    try:
        if evaluate(rule.when, facts.lookup) is not Truth.TRUE or evaluate(rule.needs, facts.lookup) is not Truth.FALSE:
            return
    except RuleError as error:
        checked.problems.append(Problem(who, str(error), rule.because, verb="has a broken recommendation:"))
        return
    parts = conjuncts(parse(rule.needs))
    plugins = [p.name.partition(".")[2] for p in parts if isinstance(p, Compare) and p.name.startswith("plugin.")]
    wanted = f"--plugins {','.join(plugins)}" if len(plugins) == len(parts) else rule.needs
    checked.advice.append(f"{who} recommends {wanted}: {rule.because}")


def _notes(checked: Checked, plugin: Plugin) -> None:
    """The plugin's sentences whose condition holds."""
    for condition, sentence in plugin.notes.items():
        try:
            if evaluate(condition, checked.facts.lookup) is Truth.TRUE:
                checked.advice.append(f"{plugin.name}: {sentence}")
        except RuleError as error:
            checked.problems.append(Problem(plugin.name, repr(condition), str(error), verb="has a broken note:"))


def _version(checked: Checked, plugin: Plugin) -> None:
    """The range of core versions a plugin works with; pip's own check is bypassed by ``--no-deps`` and editable
    trees."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        fits = plugin.core == CORE.core or SpecifierSet(plugin.core).contains(__version__, prereleases=True)
    except InvalidSpecifier:
        because = f"write a version specifier such as '~={__version__}'"
        checked.problems.append(Problem(plugin.name, repr(plugin.core), because, verb="has a broken core range:"))
        return
    if not fits:
        values = (("miles-core", __version__, "installed"),)
        because = f"{plugin.name} {plugin.version} was made for those versions; install one that fits"
        checked.problems.append(Problem(plugin.name, f"miles-core {plugin.core}", because, values))


def _packages(checked: Checked, plugin: Plugin) -> None:
    """Software that a plugin needs and whose absence would otherwise be found when the run is built."""
    for package in plugin.packages:
        if evaluate(package.when, checked.facts.lookup) is not Truth.TRUE:
            continue
        needs = f"{package.name} {package.versions}".strip()
        fact = checked.facts.get(f"{PACKAGE}.{package.name}") or installed(package, elsewhere=False)
        if fact.value == ASSUMED:
            checked.consulted.add(fact.name)
            checked.advice.append(f"{plugin.name} needs {needs} where the run starts: {package.install}")
        elif not package.fits(fact.value):
            problem = Problem(plugin.name, needs, package.install, (described(fact),))
            checked.problems.append(problem)


def _uses(checked: Checked, plugin: Plugin) -> None:
    """Every capability a plugin depends on must be one of the selected backend's."""
    for wanted, reason in plugin.uses.items():
        kinds, capability = backends_of(wanted, checked.manifests)
        if not kinds:
            everything = {
                c.name for m in [*checked.manifests.values(), CORE] for kind in m.capabilities for c in m.declared(kind)
            }
            because = did_you_mean(capability, everything) or reason
            checked.problems.append(Problem(plugin.name, f"capability {wanted}, which no backend has", because))
        for kind in kinds:
            _capability(checked, plugin.name, kind, capability, reason)


def _capability(checked: Checked, who: str, kind: str, capability: str, reason: str) -> None:
    """The selected backend of that kind must have it."""
    backend = checked.facts.lookup(kind)
    owner = provider(kind, backend.value, checked.manifests)
    if owner is None:
        return
    declared = owner.capability(kind, capability)
    needs = f"the {kind} capability {capability}"
    if declared is None:
        has = ", ".join(c.name for c in owner.declared(kind)) or "none"
        values = (described(backend), (f"capabilities of {backend.value}", has, f"manifest of {owner.name}"))
        checked.problems.append(Problem(who, needs, reason, values, choices=(kind,)))
    elif declared.when:
        because = f"{backend.value} has {capability} only when {declared.when}; {reason}"
        _rule(checked, who, Rule(declared.when, because), checked.facts)


def _warm_up(checked: Checked) -> None:
    """A precision warm-up ends with a switch, which each side that computes in a format must be able to make."""
    steps = checked.facts.lookup("precision.warmup_steps")
    if steps.state is not State.KNOWN or not steps.value:
        return
    for kind, side in zip(BACKENDS, SIDES, strict=False):
        if checked.facts.value(side) != BASE:
            reason = (
                f"after {steps.value} optimiser steps it changes its precision while the run goes on ({steps.origin})"
            )
            _capability(checked, f"a warm-up to {side} {checked.facts.value(side)}", kind, "rebuild", reason)


def _core_needs(checked: Checked) -> None:
    """What core's own options take from the backends."""
    for need in NEEDS:
        asking = names(parse(need.when))
        if all(name in checked.facts for name in asking) and evaluate(need.when, checked.facts.lookup) is Truth.TRUE:
            _capability(checked, need.who, need.kind, need.capability, need.because)


def _unused(checked: Checked) -> None:
    """Parts that no option names and of which one is used: a second is refused, and one that no backend asks for is told. A
    backend asks for the kinds of parts that its own plugin brings one of."""
    owners = [provider(kind, checked.facts.value(kind), checked.manifests) for kind in ("engine", "trainer")]
    for kind in UNNAMED:
        asked = any(owner is not None and kind in owner.provides for owner in owners)
        mine = [p for p in checked.activation.active.values() if kind in p.provides and p not in owners]
        for plugin in mine[1:] if asked else ():
            because = f"a run has one {kind}, and {mine[0].name} provides it too: leave one of them out of --plugins"
            checked.problems.append(Problem(plugin.name, f"a second {kind}", because, verb="brings"))
        for plugin in () if asked else mine:
            where = " and ".join(str(checked.facts.lookup(k)) for k in ("engine", "trainer"))
            checked.advice.append(f"{plugin.name}: its part {kind} is left unused; {where} take none")


def _transport(checked: Checked) -> None:
    """An engine must know the messages of a transport that sends some; tensors that are handed to it it always takes."""
    fact = checked.facts.lookup("transport")
    owner = provider("transport", fact.value, checked.manifests)
    if owner is not None and owner.capability("transport", str(fact.value)) is not None:
        _capability(
            checked,
            f"the transport {fact.value}",
            "engine",
            f"transport:{fact.value}",
            "an engine that does not know its messages could not be given weights",
        )


def _hooks(checked: Checked, plugin: Plugin) -> None:
    """The hook classes whose condition holds; one that is unknown here is decided on each worker."""
    for condition, targets in plugin.hooks.items():
        try:
            truth = evaluate(condition, checked.facts.lookup)
        except RuleError as error:
            checked.problems.append(
                Problem(plugin.name, repr(condition), str(error), verb="has a broken hooks condition:")
            )
            continue
        checked.consulted.update(names(parse(condition)) if condition else ())
        if truth in (Truth.TRUE, Truth.UNKNOWN):
            for target in (targets,) if isinstance(targets, str) else targets:
                checked.hooks.append(HookTarget(plugin.name, target, condition, deferred=truth is Truth.UNKNOWN))


def _reviews(checked: Checked) -> None:
    """What plugins work out by arithmetic, and whether the run fits into its GPUs. The facts at issue count as consulted."""
    layers = checked.facts.lookup("model.layers")
    if isinstance(layers.value, int) and layers.value > MOST_LAYERS:
        because = "no model has as many, and a plan counts them one by one; put the number right in config.json"
        checked.problems.append(Problem("this run", f"at most {MOST_LAYERS:,} layers", because, (described(layers),)))
        return
    model = model_config(checked.facts.value("model.hf_checkpoint"))
    usages: list[Usage] = []
    for plugin in checked.activation.active.values():
        if plugin.review:
            found: Review = _function(plugin.review)(checked.facts, model)
            checked.reviews += found.notes
            checked.problems += found.problems
            checked.consulted.update(n for p in found.problems for n in p.choices)
        if plugin.memory and model is not None:
            usages += _function(plugin.memory)(checked.facts, model)
    notes, problems = review_memory(usages, checked.facts)
    checked.reviews += notes
    checked.problems += problems


def _function(target: str) -> Callable[..., Any]:
    """The function that a manifest names as ``module:function``."""
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _orphans(checked: Checked, facts: Facts) -> None:
    """An option the user gave to a plugin that is not active would do nothing; a flag may have several owners."""
    active = checked.activation.active
    shared = {fact.flag for fact in checked.facts.values() if fact.flag and fact.name.partition(".")[0] in active}
    for fact in facts.values():
        owner = fact.name.partition(".")[0]
        if fact.value is None or fact.value is False:  # a switch turned off asks for nothing
            continue
        if fact.chosen and owner in checked.manifests and owner not in active and fact.flag not in shared:
            because = f"{fact.name} belongs to {owner}, which is not active: add it with --plugins {owner}"
            checked.problems.append(Problem(fact.origin, f"plugin.{owner}", because, (described(fact),)))


def _backends(checked: Checked) -> None:
    """The engine, trainer and runtime must be somebody's."""
    for kind in BACKENDS:
        fact = checked.facts.lookup(kind)
        named = fact.state is State.KNOWN and fact.value  # where no backend is installed nothing is named
        if named and provider(kind, fact.value, checked.manifests) is None:
            known = {n for m in [*checked.manifests.values(), CORE] for n in m.provides.get(kind, {})}
            hint = did_you_mean(str(fact.value), known) or COMES_WITH
            because = f"installed plugins provide {', '.join(sorted(known))}; {hint}"
            checked.problems.append(
                Problem("this run", f"a {kind} {fact.value!r}", because, (described(fact),), choices=(kind,))
            )
