"""Explains a plugin's requirements and whether they hold here (``miles plugins explain NAME``), and lints manifests.

``explain`` uses the same manifest and facts as the plan. ``lint`` finds errors that the plan would report only in some runs: undefined
names, conditions that cannot be parsed, missing hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from miles_core.errors import PluginError
from miles_core.nearest import did_you_mean
from miles_core.plugin.activate import backends_of, can, provider
from miles_core.plugin.check import CheckResult
from miles_core.plugin.core import CORE
from miles_core.plugin.facts import Facts, State, show
from miles_core.plugin.manifest import Plugin, Rule, Set
from miles_core.plugin.rule import RuleError, Truth, evaluate, names, parse
from miles_core.plugin.scan import find_misspelt, hooks_of

_WORDS = {
    Truth.TRUE: "holds",
    Truth.FALSE: "does not hold",
    Truth.UNKNOWN: "not known on this host",
    Truth.VACUOUS: "does not apply",
}


def explain(plugin: Plugin, checked: CheckResult, source: str) -> str:
    """Describe every constraint of a plugin with its reason and its result here.

    Args:
        plugin: the manifest.
        checked: result of a check in which the plugin is active.
        source: name of its distribution.
    """
    facts, manifests = checked.facts, checked.manifests
    lines = [f"{plugin.name} {plugin.version} ({source or 'no distribution'}): {plugin.summary}"]
    for rule in plugin.requires:
        lines += _rule("needs", rule, facts)
    for wanted, reason in plugin.uses.items():
        kinds, capability = backends_of(wanted, manifests)
        lines += [f"  uses the capability {capability} of the {' and the '.join(kinds)}", f"    because {reason}"]
        for kind in kinds:
            owner = provider(kind, facts.value(kind), manifests)
            has = owner is not None and can(owner, kind, capability, facts) is Truth.TRUE
            lines.append(f"    here {facts.lookup(kind)} {'has' if has else 'lacks'} it")
    for pair in plugin.pairs:
        experimental = ", experimental" if pair.experimental else ""
        lines.append(f"  supports {pair.rollout} rollout x {pair.train} train{experimental}")
        for rule in pair.rules:
            lines += ["  " + line for line in _rule("needs", rule, facts)]
        for rule in pair.recommends:
            lines += ["  " + line for line in _rule("recommends", rule, facts)]
    for slot, reason in plugin.claims.items():
        rivals = [m.name for m in manifests.values() if slot in m.claims and m.name != plugin.name]
        lines += [f"  claims {slot!r}, as do {', '.join(rivals) or 'no others'}", f"    because {reason}"]
    for path, given in plugin.sets.items():
        wish = given if isinstance(given, Set) else Set(given)
        applied = any(s.path == path and s.plugin == plugin.name for s in checked.activation.sets)
        when = f" when {wish.when}" if wish.when else ""
        lines.append(f"  sets {path} = {show(wish.value)}{when} ({'applied' if applied else 'not applied'} here)")
        lines += [f"    because {wish.because}"] if wish.because else []
    for rule in plugin.recommends:
        lines += _rule("recommends", rule, facts)
    for word, others in (("before", plugin.before), ("after", plugin.after)):
        lines += [f"  comes {word} {', '.join(others)} in every chain"] if others else []
    return "\n".join(lines)


def _rule(verb: str, rule: Rule, facts: Facts) -> list[str]:
    when = f", when {rule.when}" if rule.when else ""
    lines = [f"  {verb} {rule.needs}{when}", f"    because {rule.because}"]
    try:
        condition, needs = evaluate(rule.when, facts.lookup), evaluate(rule.needs, facts.lookup)
    except RuleError as error:
        return [*lines, f"    here it cannot be decided: {error}"]
    involved = [*names(parse(rule.needs)), *(names(parse(rule.when)) if rule.when else ())]
    values = ", ".join(str(facts.lookup(n)) for n in dict.fromkeys(involved))
    outcome = "does not apply" if condition in (Truth.FALSE, Truth.VACUOUS) else _WORDS[needs]
    if rule.hardware and outcome == "does not hold":
        outcome = "does not hold; --emulate-precision runs the same numerics without it"
    outcome = outcome if needs is Truth.UNKNOWN else f"here it {outcome}"
    return [*lines, f"    {outcome}: {values}"]


def emulated_here(plugin: Plugin, facts: Facts) -> bool:
    """Whether one of the plugin's formats needs tensor cores that this machine lacks, so that it needs ``--emulate-precision``."""
    rules = [rule for pair in plugin.pairs for rule in pair.rules if rule.hardware]
    return any(evaluate(rule.needs, facts.lookup) is Truth.FALSE for rule in rules)


def lint(plugin: Plugin, manifests: Mapping[str, Plugin], facts: Facts, hooks: Iterable[str] = ()) -> list[str]:
    """Return a message for each error of a manifest that does not depend on the run.

    Args:
        plugin: the manifest.
        manifests: every installed plugin; names that belong to one that is not installed cannot be checked.
        facts: facts of host and model, and the options of all these plugins.
        hooks: names of all hooks; empty to skip this check.
    """
    found = []
    for text in _conditions(plugin):
        try:
            mentioned = list(names(parse(text)))
        except RuleError as error:
            found.append(str(error))
            continue
        for name in mentioned:
            if _is_missing(name, facts):
                found.append(
                    f"rule {text!r} names {name}, which nothing defines; {did_you_mean(name, facts)}".rstrip("; ")
                )
    for path in plugin.sets:
        if _is_missing(path, facts):
            found.append(f"it sets {path}, which nothing defines; {did_you_mean(path, facts)}".rstrip("; "))
    for word, others in (("before", plugin.before), ("after", plugin.after)):
        found += [
            f"it comes {word} {name}, which is not installed; {hint}"
            for name in others
            if name not in manifests and (hint := did_you_mean(name, manifests))
        ]
    try:
        found += find_misspelt(dict.fromkeys(hooks_of(plugin), (plugin.name,)), hooks)
    except (PluginError, SyntaxError) as error:
        found.append(str(error).splitlines()[0])
    return found


def _conditions(plugin: Plugin) -> Iterator[str]:
    rules: Iterable[Rule] = [
        *plugin.requires,
        *plugin.recommends,
        *(rule for pair in plugin.pairs for rule in (*pair.rules, *pair.recommends)),
    ]
    for rule in rules:
        yield rule.needs
        yield from (rule.when,) if rule.when else ()
    yield from (condition for condition in plugin.hooks if condition)
    yield from (given.when for given in plugin.sets.values() if isinstance(given, Set) and given.when)
    yield from (hint.when for hint in plugin.hints if hint.when)
    yield from (remedy.when for remedy in plugin.remedies if remedy.when)


def _is_missing(name: str, facts: Facts) -> bool:
    """Whether core or an installed plugin should define a name but does not. Other names belong to plugins that are not installed."""
    head = name.partition(".")[0]
    if name in facts or head == "plugin" or ".uses." in name:
        return False
    heads = {n.partition(".")[0] for n in [*facts, *CORE.provides]}
    return head in heads or facts.lookup(name).state is not State.NO_SUCH_NAME
