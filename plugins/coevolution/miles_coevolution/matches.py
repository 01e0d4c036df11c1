"""Matchmaking: selects the policies of each game at random, from the run's seed and the number of the group. All samples of a group are
games between the same policies in the same roles, so that their scores are comparable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miles_coevolution.population import Side


@dataclass(frozen=True)
class Match:
    """The players of one game.

    Attributes:
        players: role -> name of the policy.
        learners: the roles whose policies learn from the game.
    """

    players: Mapping[str, str]
    learners: frozenset[str]

    @property
    def against_past(self) -> bool:
        """Whether a role is played by a past version."""
        return len(self.learners) < len(self.players) and len({*self.players.values()}) > 1


class Matchmaker:
    """Draws matches.

    Args:
        sides: all sides.
        seed: the run's seed.
        active: step -> the sides that learn in it.
        past_probability: fraction of the games in which a past version plays.
    """

    def __init__(
        self, sides: Sequence[Side], seed: int, active: Callable[[int], Sequence[Side]], past_probability: float
    ) -> None:
        self.sides = {side.name: side for side in sides}
        self.seed, self.active, self.past_probability = seed, active, past_probability

    def draw(self, roles: Sequence[str], fixed: bool, group: int, step: int) -> Match:
        """Draw the players of a group.

        Args:
            roles: the roles of the game. With ``fixed`` each is the name of the side that plays it; otherwise any two competitors
                play them, in either order.
            fixed: see ``roles``.
            group: number of the group.
            step: number of completed steps.
        """
        draw = random.Random(f"{self.seed}/match/{step}/{group}")
        active = [side.name for side in self.active(step)]
        if fixed:
            sides = [self.sides[role] for role in roles]
        else:
            first = self.sides[draw.choice(active)]
            others = [side for side in self.sides.values() if side is not first]
            sides = [first, draw.choice(others) if others else first]
        names = [draw.choice(side.members) for side in sides]
        if sides[0] is sides[-1] and len(sides[0].members) > 1:
            names = draw.sample(sides[0].members, 2)
        learners = {0, 1}
        if any(side.past for side in sides) and (draw.random() < self.past_probability or names[0] == names[1]):
            waiting = [at for at, side in enumerate(sides) if side.name not in active]
            at = draw.choice(waiting or [0, 1])
            names[at] = sides[at].past
            learners.discard(at)
        elif names[0] == names[1]:  # a policy against itself learns from one role, which has one baseline
            learners = {draw.randrange(2)}
        order = [0, 1] if fixed or draw.random() < 0.5 else [1, 0]
        players = {role: names[at] for role, at in zip(roles, order, strict=True)}
        return Match(players, frozenset(role for role, at in zip(roles, order, strict=True) if at in learners))
