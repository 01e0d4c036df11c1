"""Plan checks: every trained policy has exactly one critic that learns, and the critic-only steps end before the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact
from miles_ppo.critics import critic_name


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """Implements ``miles_core.plugin.Plugin.review``."""
    return Review(problems=(*_check_steps(facts), *_check_rewards(facts), *_check_policies(facts)))


def _check_steps(facts: Facts) -> Iterator[Problem]:
    only, steps = facts.value("ppo.only_steps", 0), facts.value("rollout.num_rollout")
    if only and steps is not None and only >= steps:
        yield Problem(
            "ppo",
            "at least one step in which the policy learns",
            "only the critic learns in the first --num-critic-only-steps steps of the run",
            tuple(describe_fact(facts.lookup(name)) for name in ("ppo.only_steps", "rollout.num_rollout")),
            choices=("ppo.only_steps",),
        )


def _check_rewards(facts: Facts) -> Iterator[Problem]:
    names = ("reward.rm_type", "reward.custom_rm_path")
    if all(facts.value(name) is None for name in names):
        yield Problem(
            "ppo",
            "a reward",
            "a critic predicts rewards; give --rm-type NAME or --custom-rm-path f.py[:function]",
            tuple(describe_fact(facts.lookup(name)) for name in names),
        )


def _check_policies(facts: Facts) -> Iterator[Problem]:
    """Check the table ``policies``; without one, the plugin adds the critic itself."""
    roles = {name: facts.value(f"policies.{name}.role", "train") for name in facts.policies}
    trained = [name for name, role in roles.items() if role == "train"]
    critics = [name for name, role in roles.items() if role == "critic"]
    expected = {critic_name(name, alone=len(trained) == 1): name for name in trained}
    for name in sorted(expected.keys() & roles.keys()):
        if roles[name] != "critic":
            yield _problem(
                facts,
                name,
                f"the role critic for the policy {name}",
                f"it has the role {roles[name]}, and a critic has to learn the values of {expected[name]}; give it the role critic, "
                "leave it out of the table, or give it another name",
            )
    one = len(trained) == 1 and len(critics) == 1
    for name in critics:
        if facts.scope(trained[0] if trained else name).value("ppo.trunk") == "policy":
            yield _problem(
                facts,
                name,
                "no policy with the role critic",
                "--critic-trunk policy makes a head on the policy's trunk the critic; leave one of the two out",
            )
        elif not one and name not in expected:
            names = ", ".join(expected)
            yield _problem(
                facts,
                name,
                f"critics with the names {names}",
                f"{len(critics)} critics and {len(trained)} policies that train are matched by their names, and no policy has the critic "
                f"{name}; rename it or leave it out",
            )


def _problem(facts: Facts, name: str, needs: str, because: str) -> Problem:
    return Problem("ppo", needs, because, (describe_fact(facts.lookup(f"policies.{name}.role")),))
