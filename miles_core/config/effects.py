"""Find options that a user set although they have no effect in the run.

An option declares with ``only_if`` the condition under which it has an effect. One that is set without that condition is an error.
It is only a note of the plan if it changes nothing: its value is the default, or the user explicitly switched off what it
configures (``--kl-loss-coef 0 --kl-loss-type k1``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from miles_core.config.config import plain
from miles_core.config.schema import CORE, Option, Schema
from miles_core.plugin.facts import Fact, Facts, State, show
from miles_core.plugin.rule import Truth, UnknownFact, evaluate, names, parse


@dataclass(frozen=True)
class Idle:
    """An option without effect.

    Attributes:
        message: names the option, its condition, the values that violate it and what to do.
        harmless: whether the run would do the same without the option.
    """

    message: str
    harmless: bool


def find_idle(schema: Schema, facts: Facts, plugins: Collection[str] = ()) -> Iterator[Idle]:
    """Yield the options that a user set and that have no effect.

    Options with a condition that these facts do not decide are left out.

    Args:
        schema: all options.
        facts: the facts of a plan or, with fewer conditions that they decide, of a configuration.
        plugins: the plugins of the run, in addition to those with a fact ``plugin.NAME``.
    """
    scopes = [facts.scope(policy) for policy in facts.policies]
    active = {CORE, *plugins, *(name for name in schema.manifests if facts.value(f"plugin.{name}"))}
    for flag in schema.distinct_flags():
        options = [option for option in flag.options if option.owner in active]
        if not options or not all(option.info.only_if for option in options):
            continue
        idle = [_find_idle(option, facts, scopes) for option in options]  # one flag, with several owners
        if all(idle):
            yield next(each for each in idle if each)
        for policy, scope in zip(facts.policies, scopes, strict=True):
            for option in options:
                own = facts.get(f"policies.{policy}.{option.fact}")
                found = _judge(option, own, scope) if own is not None else None
                if found:
                    yield found


def undecide(facts: Facts, schema: Schema) -> Facts:
    """Return the facts of a configuration; values that an installed plugin may still set are marked as unknown."""
    settable = {path for manifest in schema.manifests.values() for path in manifest.sets}
    return facts.with_facts(
        dataclasses.replace(fact, state=State.UNKNOWN)
        for fact in facts.values()
        if fact.name in settable and not fact.chosen
    )


def _find_idle(option: Option, facts: Facts, scopes: list[Facts]) -> Idle | None:
    """Check an option of the run; it has an effect if it has one for any policy."""
    fact = facts.get(option.fact)
    found = [_judge(option, fact, scope) for scope in scopes] if fact is not None else []
    return found[0] if found and all(found) else None


def _judge(option: Option, fact: Fact, facts: Facts) -> Idle | None:
    """Return why a value has no effect with these facts; None if it has one, is off, was not set, or the facts do not decide it."""
    condition = parse(option.info.only_if)
    off = fact.value is None or fact.value is False or fact.value == ""
    if not fact.chosen or (off and not option.default):
        return None
    try:
        if evaluate(condition, facts.lookup) is not Truth.FALSE:
            return None
    except UnknownFact:  # a fact of the model or of another plugin, which a configuration alone does not have
        return None
    causes = [facts.lookup(name) for name in dict.fromkeys(names(condition))]
    actual = " and ".join(f"{c.flag or c.name} is {show(c.value) or 'none'} ({c.origin})" for c in causes)
    switched_off = any(cause.flag and cause.chosen and not cause.value for cause in causes)
    message = f"{fact.origin}: it needs {condition}, and {actual}: otherwise it has no effect; change that, or leave {option.flag} out"
    return Idle(message, harmless=switched_off or fact.value == plain(option.default))
