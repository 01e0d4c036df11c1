"""Checks of a plan: a population has members to choose from, a game has the players it needs, and players have engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_coevolution.config import MUTABLE, ROLES, count_past_versions
from miles_core.plugin import Facts, Problem, Review, describe_fact


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """See ``Plugin.review``."""
    problems = tuple(_problems(facts))
    return Review((_summary(facts),) if not problems else (), problems)


def _trained(facts: Facts) -> list[str]:
    """The policies that train; without a table ``policies`` there is one."""
    return [name for name in facts.policies if facts.value(f"policies.{name}.role", "train") == "train"]


def _summary(facts: Facts) -> str:
    """The policies that the run will have."""
    sides = _trained(facts)
    size, past = facts.value("coevolution.population_size") or 1, _past_versions(facts, sides)
    members = [f"{name}: {size} that learn{', one for past versions' if past else ''}" for name in sides]
    engines = len(sides) * (size + bool(past))
    if past and facts.value("coevolution.past_versions") is None:
        members.append(
            f"self-play: {sides[0]} has no other opponent and plays against {past} past version of itself, replaced after each round "
            "(--co-evolution-past-versions K keeps more)"
        )
    return "\n".join([f"co-evolution: {engines} policies with an engine", *members])


def _past_versions(facts: Facts, sides: list[str]) -> int:
    given, size = facts.value("coevolution.past_versions"), facts.value("coevolution.population_size")
    return count_past_versions(given, len(sides), size, facts.value("rollout.generate"))


def _problems(facts: Facts) -> Iterator[Problem]:
    sides = _trained(facts)
    size, past = facts.value("coevolution.population_size"), _past_versions(facts, sides)
    if size == 1:
        yield Problem(
            "coevolution",
            "at least two members in a population",
            "selection compares members, and a population of one has none to compare; leave population_size out for one policy per side",
            (describe_fact(facts["coevolution.population_size"]),),
            choices=("coevolution.population_size",),
            tries=lambda: [{"coevolution.population_size": 2}],
        )
    if len(sides) == 1 and size is None and not past and not ROLES.get(str(facts.value("rollout.generate"))):
        yield Problem(
            "coevolution",
            "an opponent for its only policy",
            "one policy that trains plays with itself alone; add another to the table policies of the configuration file, or members "
            "(--co-evolution-population-size 2), or past versions (--co-evolution-past-versions 4)",
            (describe_fact(facts["coevolution.past_versions"]),),
            choices=("coevolution.past_versions", "coevolution.population_size"),
            tries=lambda: [{"coevolution.past_versions": 4}, {"coevolution.population_size": 2}],
        )
    yield from _check_players(facts, sides)
    if (size or 1) > 1:
        yield from _check_mutations(facts, sides)


def _check_players(facts: Facts, sides: list[str]) -> Iterator[Problem]:
    """Every role of the game has a policy, every policy has a role, and all of them have engines."""
    generate = facts.value("rollout.generate")
    needed = ROLES.get(str(generate), ())
    if missing := [name for name in needed if name not in sides]:
        yield Problem(
            "coevolution",
            f"a policy {' and a policy '.join(missing)} that train{'s' if len(missing) == 1 else ''}",
            f"--generate {generate} has the roles {' and '.join(needed)}; write in the configuration file: policies: "
            f"{{{', '.join(f'{name}: {{}}' for name in needed)}}}",
            (describe_fact(facts["rollout.generate"]),),
        )
    if needed and (further := [name for name in sides if name not in needed]):
        yield Problem(
            "coevolution",
            f"no policy {further[0]} that trains",
            f"--generate {generate} has the roles {' and '.join(needed)} only, so {further[0]} would never play; leave it out, or give it "
            "the role frozen",
            (describe_fact(facts["rollout.generate"]),),
        )
    for name in sides:
        if not facts.value(f"policies.{name}.generates", True):
            yield Problem(
                "coevolution",
                f"an engine for the policy {name}",
                "a policy that plays generates its own turns; leave generates: false out, or give it the role frozen",
                (describe_fact(facts[f"policies.{name}.generates"]),),
            )


def _check_mutations(facts: Facts, sides: list[str]) -> Iterator[Problem]:
    """A mutation multiplies, so a value of 0 or an unset one would never change."""
    names = [part for part in str(facts.value("coevolution.mutate") or "").split(",") if part]
    for side in sides:
        for name in names:
            fact = facts.scope(side).lookup(MUTABLE[name])
            if not fact.value:
                yield Problem(
                    "coevolution",
                    f"a value of {MUTABLE[name]} above 0 for the policy {side}",
                    f"mutate has {name} in it, and a mutation multiplies the value; set it, or leave {name} out of mutate",
                    (describe_fact(fact),),
                )
