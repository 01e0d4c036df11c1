"""Games: a rollout function in which several policies act, and exact scores.

A game plays one sample between the policies of a match and returns the turns and the score of each role. ``play`` sends requests to
policies through ``ask``. The plugin creates one sample for each role that learns: the tokens of this role are trained on, all others are
context.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_coevolution.matches import Match, Matchmaker
from miles_core.data import Sample, Status
from miles_core.plugin import DataError, GenerationClient, RolloutFunction, Run, StateKey, Turn

#: Set by the plugin in ``on_start``.
MATCHMAKER = StateKey[Matchmaker]()
#: Entry of a sample's metadata: role, score, win, and whether a past version played.
ENTRY = "coevolution"
#: Entry of a prompt's metadata: the policy that plays an evaluation.
PLAYER = "player"


@dataclass(frozen=True)
class Played:
    """The turns and the result of one role in one game.

    Attributes:
        role: the role.
        turns: its turns in one conversation, in order; empty if the game ended before the role acted.
        last: the turn at which its sample ends.
        score: the reward.
        win: share of the contest that the role won, 0 to 1 (0.5 is a draw); used for metrics.
        complete: whether the rules of the game end each turn, as in a game with one-token moves, so that reaching the length limit is not a
        truncation.
        attempt: whether it is one of several attempts at one task. Advantages compare these with each other, instead of with the other games of
            the group, whose tasks may be easier.
    """

    role: str
    turns: Sequence[Turn]
    last: Turn
    score: float
    win: float
    complete: bool = False
    attempt: bool = False


class Game(ABC):
    """A game between two roles.

    Attributes:
        roles: the two roles.
        fixed: whether each role is played by the side of that name (proposer and solver); otherwise any two competitors play.
    """

    roles: tuple[str, str] = ("first", "second")
    fixed: bool = False

    @abstractmethod
    async def play(self, sample: Sample, ask: GenerationClient, players: Mapping[str, str]) -> list[Played]:
        """Play one game.

        Args:
            sample: the prompt, with the metadata of its row.
            ask: sends requests; ``policy=players[role]`` selects the engine.
            players: role -> name of the policy.

        Returns:
            what each role did; a role may occur several times, and every role occurs at least once.
        """

    @abstractmethod
    async def evaluate(self, sample: Sample, ask: GenerationClient, player: str) -> Played:
        """Play a held-out game in which ``player`` is the only policy, against an exact opponent or on a fixed task."""


class GameFunction(RolloutFunction):
    """The rollout function of a game. A provider of ``--generate NAME`` returns it."""

    def __init__(self, run: Run, game: Game) -> None:
        self.run, self.game = run, game

    async def __call__(self, sample: Sample, ask: GenerationClient) -> list[Sample]:
        """Play one game; returns the samples of the roles that learn, or of the evaluated player."""
        player = sample.metadata.get(PLAYER)
        if player is not None:
            played = await self.game.evaluate(sample, ask, str(player))
            return [sample_of(sample, played, str(player), ask)]
        game = self.game
        match = self.run.state[MATCHMAKER].draw(game.roles, game.fixed, sample.group_index, self.run.step)
        plays = await game.play(sample, ask, match.players)
        return [
            sample_of(sample, one, match.players[one.role], ask, match) for one in plays if one.role in match.learners
        ]


def sample_of(like: Sample, played: Played, policy: str, ask: GenerationClient, match: Match | None = None) -> Sample:
    """Make the sample of one role: the conversation up to ``played.last``, with a loss mask of 1 on the role's own tokens."""
    one, path = copy.deepcopy(like), played.last.path
    first = len(path[0].prompt)
    one.tokens, one.policy = played.last.tokens, policy
    one.response_length = len(one.tokens) - first
    one.response = str(ask.tokenizer.decode(one.tokens[first:], skip_special_tokens=True))
    mask = [0] * one.response_length
    for turn in played.turns:
        mask[turn.start - first : turn.end - first] = [1] * (turn.end - turn.start)
    one.loss_mask = None if all(mask) else mask
    if played.complete or not played.turns:
        one.status = Status.COMPLETED
    if not played.turns:  # no engine call of this policy provides these
        one.rollout_log_probs = [0.0] * one.response_length
        one.weight_versions = [(first, played.last.response.weight_versions[0][1])]
    past = match is not None and match.against_past
    one.metadata[ENTRY] = {"role": played.role, "score": played.score, "win": played.win, "past": past}
    if played.attempt:
        one.metadata[ENTRY]["attempt"] = True
    return one


def group_attempts(samples: Sequence[Sample]) -> list[Sample]:
    """Assign the attempts at each task to a separate group, in which each attempt is a rollout.

    Attempts at one task are siblings: they have the rollout id of their game. All other samples keep their groups and siblings.

    Args:
        samples: the samples that one policy learns from.

    Returns:
        copies with other group and rollout ids; the samples themselves if there is no attempt among them.
    """
    if not any(sample.metadata.get(ENTRY, {}).get("attempt") for sample in samples):
        return list(samples)
    groups: dict[object, int] = {}
    rollouts: dict[object, int] = {}
    found = []
    for number, sample in enumerate(samples):
        attempt = sample.metadata.get(ENTRY, {}).get("attempt", False)
        group = (sample.group_index, sample.rollout_id) if attempt else sample.group_index
        one = copy.copy(sample)
        one.group_index = groups.setdefault(group, len(groups))
        one.rollout_id = rollouts.setdefault((sample.rollout_id, number if attempt else None), len(rollouts))
        found.append(one)
    return found


def make_reward() -> Callable[[Any, Sample], Awaitable[float]]:
    """``--rm-type game``: the score of the role that the sample belongs to."""

    async def game(args: Any, sample: Sample) -> float:
        if ENTRY not in sample.metadata:
            raise DataError(
                f"sample {sample.index} was not made by a game, so --rm-type game has no score for it; choose a game with --generate "
                "nim or --generate proposer"
            )
        return float(sample.metadata[ENTRY]["score"])

    return game
