"""Nim with one pile: two players alternately take 1 to 3 objects; the player who takes the last one wins.

The game is solved (Bouton, 1901): the player to move loses exactly if the size of the pile is a multiple of 4, and wins by leaving such a pile. So
every move can be scored, and a perfect opponent exists: from a pile that is not a multiple of 4, the mover beats it only with perfect play.

A position is text, ``7:``, and a move is one token, ``3``. The next position follows in the same conversation. Any other text loses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_coevolution.game import PLAYER, Game, GameFunction, Played
from miles_core.data import PromptSource, Row, Sample
from miles_core.plugin import ConfigError, GenerationClient, Run, Turn

MOST = 3


def best_move(pile: int) -> int:
    """The move that wins, or 1 from a lost position."""
    return pile % (MOST + 1) or 1


def is_won(pile: int) -> bool:
    """Whether the player to move wins with perfect play."""
    return pile % (MOST + 1) != 0


def position(pile: int) -> str:
    """The text of a position."""
    return f"{pile}:"


def read_move(text: str, pile: int) -> int | None:
    """The move that a text represents; None if it is not a legal move."""
    text = text.strip()
    move = int(text) if text in ("1", "2", "3") else 0
    return move if 1 <= move <= pile else None


class Nim(Game):
    """``--generate nim``."""

    async def play(self, sample: Sample, ask: GenerationClient, players: Mapping[str, str]) -> list[Played]:
        """See ``Game.play``. The winner has the score 1, the loser 0."""
        turns: dict[str, list[Turn]] = {role: [] for role in self.roles}
        winner = await self._game(sample, ask, turns, {role: players[role] for role in self.roles})
        last = ask.transcript.turns[-1]
        wins = {role: float(role == winner) for role in self.roles}
        return [
            Played(role, own, own[-1] if own else last, wins[role], wins[role], True) for role, own in turns.items()
        ]

    async def evaluate(self, sample: Sample, ask: GenerationClient, player: str) -> Played:
        """See ``Game.evaluate``: the player moves first, against perfect play."""
        turns: dict[str, list[Turn]] = {role: [] for role in self.roles}
        winner = await self._game(sample, ask, turns, {"first": player})
        win = float(winner == "first")
        return Played("first", turns["first"], turns["first"][-1], win, win, True)

    async def _game(
        self, sample: Sample, ask: GenerationClient, turns: dict[str, list[Turn]], players: Mapping[str, str]
    ) -> str:
        """Play until a role wins, and return it. A role without a player plays perfectly."""
        pile, at = int(sample.metadata["pile"]), 0
        text, before = "", None
        optimal: list[float] = []
        while True:
            role, other = self.roles[at % 2], self.roles[(at + 1) % 2]
            if role in players:
                turn = await _move(ask, text + position(pile), before, players[role])
                turns[role].append(turn)
                text, before = "", turn
                move = read_move(turn.response.text, pile)
                if is_won(pile):
                    optimal.append(float(move == best_move(pile)))
            else:
                move = best_move(pile)
                text += f"{position(pile)}{move} "
            if move is None or pile == move:
                break
            pile, at = pile - move, at + 1
            text = text or " "
        if optimal:
            ask.metrics["nim/optimal_moves"] = sum(optimal) / len(optimal)
        ask.metrics["nim/legal"] = float(move is not None)
        return other if move is None else role


async def _move(ask: GenerationClient, text: str, before: Turn | None, policy: str) -> Turn:
    """Ask a policy for one move; ``text`` follows the turn ``before``, or is the sample's prompt."""
    sampling = {"max_new_tokens": 1}
    if before is None:
        return await ask(sampling=sampling, policy=policy)
    tokens = ask.tokenizer.encode(text, add_special_tokens=False)
    return await ask(tokens, after=before, sampling=sampling, policy=policy)


class Piles(PromptSource):
    """Positions to start from: endless in training, and in evaluation each won position once for each policy.

    Args:
        piles: sizes to start from.
        players: the policies to evaluate; empty in training.
    """

    def __init__(self, piles: Sequence[int], players: Sequence[str] = ()) -> None:
        self.piles, self.at = list(piles), 0
        self.rows = [(player, pile) for player in players for pile in piles if is_won(pile)]
        self.length = len(self.rows) if players else None

    def next(self, n: int) -> list[Row]:
        """See ``PromptSource.next``."""
        found = [self._row(self.at + i) for i in range(n)]
        self.at += n
        return found

    def _row(self, number: int) -> Row:
        if self.length is None:
            pile, metadata = self.piles[number % len(self.piles)], {}
        else:
            player, pile = self.rows[number % self.length]
            metadata = {PLAYER: player}
        return Row(position(pile), metadata={"pile": pile, **metadata}, index=number, place=f"position {pile}")

    def state(self) -> dict[str, Any]:
        """See ``PromptSource.state``."""
        return {"at": self.at}

    def load_state(self, state: dict[str, Any]) -> None:
        """See ``PromptSource.load_state``."""
        self.at = int(state["at"])


def make_generate(run: Run) -> GameFunction:
    """``--generate nim``."""
    return GameFunction(run, Nim())


def make_prompts(run: Run, data: str, purpose: str) -> Piles:
    """``--prompts nim --prompt-data 1-12``, ``--eval-prompts nim --eval-prompt-data 1-12``: the smallest and the largest pile."""
    low, dash, high = (data or "1-12").partition("-")
    if not (low.isdigit() and (high.isdigit() or not dash)) or not 1 <= int(low) <= int(high or low):
        raise ConfigError(
            f"nim takes the sizes of its piles as data, smallest-largest, got {data!r}: --prompt-data 1-12"
        )
    piles = range(int(low), int(high or low) + 1)
    players = [policy.name for policy in run.policies if policy.role == "train"]
    if purpose != "train" and not any(map(is_won, piles)):
        raise ConfigError(
            f"--eval-prompts nim: no position of {data} can be won by the first player; include another size"
        )
    return Piles(piles, () if purpose == "train" else players)
