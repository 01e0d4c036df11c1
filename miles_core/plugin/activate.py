"""Determine the active plugins, the values they set, and the derived facts.

A plugin is active if the user names it, if an option selects a part that it provides (``--engine mine``,
``--rollout-precision mine``), or if an active plugin requires it. Values set by plugins change facts, facts decide conditions,
and conditions decide which values are set. These steps are therefore repeated until nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from miles_core.nearest import did_you_mean
from miles_core.plugin.core import CORE
from miles_core.plugin.facts import COMES_WITH, Fact, Facts, State, show
from miles_core.plugin.manifest import Plugin, Rule, Set
from miles_core.plugin.plan import Setting
from miles_core.plugin.problem import Problem, describe_fact
from miles_core.plugin.rule import Compare, RuleError, Truth, conjuncts, evaluate, names, parse, same

#: Backends. Like the name of a number format, the selected name activates the plugin that provides it.
BACKENDS = ("engine", "trainer", "runtime")
SELECTED = (*BACKENDS, "format")
SIDES = ("rollout.precision", "train.precision")
#: Prefix of facts that are environment variables; a manifest may set them (``sets={"env.NAME": "1"}``).
ENVIRONMENT = "env."
_ROUNDS = 32


@dataclass
class Activation:
    """The active plugins and their effects.

    Attributes:
        active: name -> manifest in order of activation, core last.
        because: plugin -> why it is active.
        facts: all facts, including derived and set ones.
        sets: values set by plugins, in order of activation.
        problems: unknown plugin names and conflicting values.
    """

    active: dict[str, Plugin]
    because: dict[str, str]
    facts: Facts
    sets: tuple[Setting, ...] = ()
    problems: list[Problem] = field(default_factory=list)


def activate(requested: Mapping[str, str], manifests: Mapping[str, Plugin], facts: Facts) -> Activation:
    """Activate plugins, set values and derive facts until nothing changes.

    Args:
        requested: plugin -> origin of the request, in command-line order.
        manifests: every installed plugin.
        facts: options, host and model facts.
    """
    because = {name: why for name, why in requested.items() if name in manifests and name != "core"}
    problems = [_unknown_plugin(name, why, manifests) for name, why in requested.items() if name not in because]
    because |= {name: why for name, why in _find_selected(facts, manifests) if name not in because}
    sets: tuple[Setting, ...] = ()
    for _ in range(_ROUNDS):
        active = {**{name: manifests[name] for name in because}, "core": CORE}
        derived = derive(facts, active, manifests, sets)
        wanted = dict([*_find_selected(derived, manifests), *_find_required(active, derived, manifests)])
        outcomes = [*_find_settings(active, derived, facts)]
        settings = tuple(s for s in outcomes if isinstance(s, Setting))
        if wanted.keys() <= because.keys() and settings == sets:
            problems += [p for p in outcomes if isinstance(p, Problem)]
            return Activation(active, because, derived, sets, problems)
        because |= {name: why for name, why in wanted.items() if name not in because}
        sets = settings
    paths = ", ".join(sorted({s.path for s in sets}))
    reason = f"conditions of these values depend on each other: {paths}"
    problems.append(Problem("what plugins set", "never settles", reason, verb=""))
    return Activation(active, because, derived, sets, problems)


def _unknown_plugin(name: str, why: str, manifests: Mapping[str, Plugin]) -> Problem:
    if name == "core":
        return Problem(why, "'core'", "core is always active: leave it out", verb="must not name")
    names = [n for n, plugin in manifests.items() if n != "core" and not plugin.standard]
    hint = did_you_mean(name, names) or COMES_WITH
    return Problem(
        why,
        f"{name!r}",
        f"installed plugins are: {', '.join(names) or 'none'}; {hint}",
        verb="names no installed plugin:",
    )


def derive(
    facts: Facts, active: Mapping[str, Plugin], manifests: Mapping[str, Plugin], sets: tuple[Setting, ...]
) -> Facts:
    """Add the facts that follow from the active plugins: set values, ``plugin.*``, ``*.uses.*`` and ``*.has.*``."""
    extra: dict[str, Fact] = {}
    for name, plugin in manifests.items():
        if name != "core" and not plugin.standard:  # standard plugins belong to every run
            extra[f"plugin.{name}"] = Fact(
                f"plugin.{name}", name in active, "active" if name in active else "not active"
            )
    extra |= {f.name: f for f in _capability_facts(active, manifests, facts)}
    for path in (p for m in manifests.values() for p in m.sets if p.startswith(ENVIRONMENT)):
        if path not in facts:
            extra[path] = Fact(path, None, "not set in this environment")
    for s in sets:
        before = extra.get(s.path) or facts.lookup(s.path)
        extra[s.path] = replace(before, value=s.value, origin=f"set by {s.plugin}", state=State.KNOWN)
    inactive = {n for n, plugin in manifests.items() if n not in active and n != "core" and not plugin.standard}
    derived = facts.with_facts(extra.values(), inactive)
    return derived.with_facts(_hide_driver_gpu(derived, manifests))


def _capability_facts(active: Mapping[str, Plugin], manifests: Mapping[str, Plugin], facts: Facts) -> Iterator[Fact]:
    """Yield, for every declared capability, whether an active plugin uses it and whether the selected backend has it."""
    for kind in BACKENDS:
        selected = facts.value(kind)
        owner, origin = provider(kind, selected, manifests), f"manifest of --{kind} {selected}"
        for capability in {c.name: None for m in [*manifests.values(), CORE] for c in m.list_capabilities(kind)}:
            name = f"{kind}.uses.{capability}"
            users = [p.name for p in active.values() if capability in p.uses or f"{kind}.{capability}" in p.uses]
            yield Fact(name, bool(users), f"used by {', '.join(users)}" if users else "no active plugin uses it")
            has = owner is not None and owner.capability(kind, capability) is not None
            yield Fact(f"{kind}.has.{capability}", has, origin)


def _hide_driver_gpu(facts: Facts, manifests: Mapping[str, Plugin]) -> Iterator[Fact]:
    """Make the GPU facts unknown if the driver has no GPU and the runtime uses other machines, which may have GPUs."""
    runtime = facts.value("runtime")
    owner = provider("runtime", runtime, manifests)
    gpu = facts.lookup("gpu")
    if owner is None or owner.capability("runtime", "remote") is None:
        return
    if gpu.state is State.KNOWN and gpu.value == "none" and not gpu.chosen:
        origin = f"no GPU on this host, and {runtime} works on others"
        for fact in facts.values():
            if fact.name == "gpu" or fact.name.startswith("gpu."):
                yield replace(fact, state=State.UNKNOWN, value=None, origin=origin)


def provider(kind: str, name: object, manifests: Mapping[str, Plugin]) -> Plugin | None:
    """Return the plugin that provides the part ``name`` of a kind (``format`` for number formats); plugins come before core."""
    if isinstance(name, str):
        for manifest in [*manifests.values(), CORE]:
            if name in (manifest.formats if kind == "format" else manifest.provides.get(kind, {})):
                return manifest
    return None


def backends_of(wanted: str, manifests: Mapping[str, Plugin]) -> tuple[tuple[str, ...], str]:
    """Return (kinds of backends, capability) of an entry of ``uses``: ``engine.x``, or ``x`` for all kinds that declare it."""
    head, _, rest = wanted.partition(".")
    if head in BACKENDS and rest:
        return (head,), rest
    everyone = [*manifests.values(), CORE]
    return tuple(k for k in BACKENDS if any(m.capability(k, wanted) for m in everyone)), wanted


def can(owner: Plugin, kind: str, capability: str, facts: Facts) -> Truth:
    """Whether the backend of a kind provided by ``owner`` has a capability, given the facts that its condition reads."""
    declared = owner.capability(kind, capability)
    return Truth.FALSE if declared is None else evaluate(declared.when, facts.lookup)


def _find_selected(facts: Facts, manifests: Mapping[str, Plugin]) -> Iterator[tuple[str, str]]:
    """Yield (plugin, reason) for plugins that provide a part selected by an option."""
    chosen = [("format", facts.scope(policy).lookup(side)) for policy in facts.policies for side in SIDES]
    chosen += [(kind, facts.lookup(kind)) for kind in BACKENDS]
    for kind, fact in chosen:
        owner = provider(kind, fact.value, manifests) if fact.state is State.KNOWN else None
        if owner is not None and owner.name != "core" and not owner.standard:
            yield owner.name, f"{fact.name} = {show(fact.value)} ({fact.origin})"


def _find_required(
    active: Mapping[str, Plugin], facts: Facts, manifests: Mapping[str, Plugin]
) -> Iterator[tuple[str, str]]:
    """Yield (plugin, reason) for plugins that rules of active plugins require."""
    for plugin in active.values():
        for rule in plugin.requires:
            try:
                applies = evaluate(rule.when, facts.lookup) is Truth.TRUE
            except RuleError:
                continue  # the checker reports the error
            for name in plugins_needed(rule) if applies else ():
                if name in manifests:
                    yield name, f"required by {plugin.name}: {rule.because}"


def plugins_needed(rule: Rule) -> tuple[str, ...]:
    """Return the plugins that a rule requires by ``plugin.x``, alone or as an operand of ``and``."""
    try:
        parts = conjuncts(parse(rule.needs))
    except RuleError:
        return ()  # the checker reports the error
    names = (part.name for part in parts if isinstance(part, Compare) and not part.op)
    return tuple(name.removeprefix("plugin.") for name in names if name.startswith("plugin."))


def _find_settings(active: Mapping[str, Plugin], derived: Facts, facts: Facts) -> Iterator[Setting | Problem]:
    """Yield every value that an active plugin sets, and a problem for every conflict."""
    first: dict[str, Setting] = {}
    for plugin in active.values():
        wishes = ((path, w) for path, ws in plugin.sets.items() for w in (ws if isinstance(ws, tuple) else (ws,)))
        for path, given in wishes:
            wish = given if isinstance(given, Set) else Set(given)
            try:
                truth = evaluate(wish.when, derived.lookup)
            except RuleError as error:
                yield Problem(plugin.name, path, str(error), verb="cannot decide whether to set")
                continue
            target = derived.lookup(path)
            if truth in (Truth.FALSE, Truth.VACUOUS) or target.state is State.NOT_APPLICABLE:
                continue
            if target.state is State.NO_SUCH_NAME:
                if _has_head(path, derived):
                    yield Problem(plugin.name, f"{path}, which no part defines", target.origin, verb="sets")
                continue  # an option of a plugin that is not installed
            if truth is Truth.UNKNOWN and not (path.startswith(ENVIRONMENT) and _asks_gpu_only(wish.when, derived)):
                because = f"its condition {wish.when!r} is not known on this host: give it with --fact"
                yield Problem(plugin.name, f"{path} = {show(wish.value)}", because, verb="cannot decide whether to set")
                continue
            yield from _check_setting(Setting(path, wish.value, plugin.name), wish.because, first, facts)


def _asks_gpu_only(when: str, facts: Facts) -> bool:
    """Whether a condition is unknown only because the GPUs of the workers are."""
    unknown = [name for name in names(parse(when)) if facts.lookup(name).state is State.UNKNOWN]
    return all(name.startswith("gpu.") for name in unknown)


def _check_setting(
    setting: Setting, because: str, first: dict[str, Setting], facts: Facts
) -> Iterator[Setting | Problem]:
    """Yield the setting if it is the first for its path, a problem if it conflicts, and nothing if it repeats a value."""
    path, value = setting.path, setting.value
    user, other = facts.get(path), first.get(path)
    needs = f"{path} == {show(value)}"
    if other is not None:
        if not same(other.value, value):
            values = (
                (path, show(other.value), f"set by {other.plugin}"),
                (path, show(value), f"set by {setting.plugin}"),
            )
            reason = because or "one option has one value"
            yield Problem(setting.plugin, needs, reason, values)
    elif user is not None and user.chosen and not same(user.value, value):
        reason = because or f"{setting.plugin} sets this value itself and does not work with another"
        yield Problem(setting.plugin, needs, reason, (describe_fact(user),), choices=(path,))
    else:
        first[path] = setting
        yield setting


def _has_head(path: str, facts: Facts) -> bool:
    head = path.partition(".")[0] + "."
    return any(name.startswith(head) for name in facts)
