"""Proposer against solver: one policy chooses tasks of reasoning-gym, the other solves them, and the task's verifier scores the answers.

The proposer writes a task as a letter and a level, for example ``b3``. The solver answers the task's question several times. The solver's score
is the verifier's (1 for a correct answer). The proposer's is ``4 p (1 - p)``, with the fraction p of correct answers: 1 for a task that the
solver solves half of the time, 0 for one that it always or never solves, and for invalid tasks (learnability, as in Absolute Zero, arXiv
2505.03335, and SFL, arXiv 2408.15099).

Questions for training depend on the number of the sample; held-out questions have other seeds. The lowest levels have few different questions,
which therefore occur in both.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from miles_coevolution.game import PLAYER, Game, GameFunction, Played
from miles_core.data import PromptSource, Row, Sample
from miles_core.plugin import ConfigError, GenerationClient, Run, Turn

#: What the proposer is asked.
PROPOSE = "Task: "
#: Entry of a held-out prompt's metadata: task, level and seed.
TASK = "task"
_CHOICE = re.compile(r"\s*([a-z])\s*([1-9])(?!\d)")


@dataclass(frozen=True)
class Task:
    """One kind of task.

    Attributes:
        data_set: name of the data set of reasoning-gym.
        fixed: options of the data set that are equal at all levels.
        graded: options that grow with the level: value at the first level, which is multiplied by the level.
        levels: number of levels.
    """

    data_set: str
    fixed: Mapping[str, Any]
    graded: Mapping[str, int]
    levels: int

    def configure(self, level: int) -> dict[str, Any]:
        """Options of the data set at a level."""
        return {**self.fixed, **{name: value * level for name, value in self.graded.items()}}


_TWO_TERMS, _DIGITS = {"min_terms": 2, "max_terms": 2}, {"min_digits": 1, "max_digits": 1}
#: Letter -> task. Higher levels have more digits or larger numbers.
TASKS = {
    "a": Task("chain_sum", _TWO_TERMS, _DIGITS, levels=4),
    "b": Task("count_bits", {"min_n": 1}, {"max_n": 3}, levels=9),
    "c": Task("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 1}, {"max_value": 3}, levels=9),
    "d": Task("products", _TWO_TERMS, _DIGITS, levels=4),
}


@dataclass(frozen=True)
class Question:
    """A question with what its verifier needs."""

    text: str
    data_set: Any
    entry: Mapping[str, Any]

    def score(self, answer: str) -> float:
        """1 if the verifier accepts the answer completely, else 0."""
        return float(self.data_set.score_answer(answer.strip(), self.entry) >= 1.0)


def parse(text: str) -> tuple[str, int] | None:
    """The task and the level that a text names; None if it names none."""
    match = _CHOICE.match(text)
    if match is None or match[1] not in TASKS or int(match[2]) > TASKS[match[1]].levels:
        return None
    return match[1], int(match[2])


@lru_cache(maxsize=4096)
def make_question(letter: str, level: int, seed: int) -> Question:
    """The question of a task, level and seed."""
    import reasoning_gym

    task = TASKS[letter]
    data_set = reasoning_gym.create_dataset(task.data_set, size=1, seed=seed, **task.configure(level))
    entry = data_set[0]
    return Question(f"{entry['question']}\nAnswer: ", data_set, entry)


class ProposerGame(Game):
    """``--generate proposer``."""

    roles, fixed = ("proposer", "solver"), True

    def __init__(self, attempts: int) -> None:
        self.attempts = attempts

    async def play(self, sample: Sample, ask: GenerationClient, players: Mapping[str, str]) -> list[Played]:
        """See ``Game.play``."""
        proposed = await ask(policy=players["proposer"])
        chosen = parse(proposed.response.text)
        ask.metrics["proposer/valid"] = float(chosen is not None)
        if chosen is None:
            return [Played("proposer", [proposed], proposed, 0.0, 0.0), Played("solver", [], proposed, 0.0, 1.0)]
        question = make_question(*chosen, sample.index)
        tokens = ask.tokenizer.encode(question.text, add_special_tokens=False)
        answers = await asyncio.gather(*(ask(tokens, policy=players["solver"]) for _ in range(self.attempts)))
        scores = [question.score(answer.response.text) for answer in answers]
        solved = sum(scores) / len(scores)
        ask.metrics["proposer/solved"] = solved
        ask.metrics["proposer/level"] = float(chosen[1])
        proposer = Played("proposer", [proposed], proposed, 4.0 * solved * (1.0 - solved), 1.0 - solved)
        return [proposer, *(self._solved(answer, score, True) for answer, score in zip(answers, scores, strict=True))]

    async def evaluate(self, sample: Sample, ask: GenerationClient, player: str) -> Played:
        """See ``Game.evaluate``: the player answers a held-out question."""
        turn = await ask(policy=player)
        return self._solved(turn, make_question(*sample.metadata[TASK]).score(turn.response.text))

    def _solved(self, turn: Turn, score: float, attempt: bool = False) -> Played:
        return Played("solver", [turn], turn, score, score, attempt=attempt)


class TaskPrompts(PromptSource):
    """The proposer's prompt, endless in training; in evaluation held-out questions, the same number at each level of each task.

    Args:
        count: questions per level.
        solvers: the policies to evaluate; empty in training.
    """

    def __init__(self, count: int = 0, solvers: tuple[str, ...] = ()) -> None:
        self.at = 0
        levels = [(letter, level) for letter, task in TASKS.items() for level in range(1, task.levels + 1)]
        self.rows = [(name, letter, level, n) for name in solvers for letter, level in levels for n in range(count)]
        self.length = len(self.rows) if solvers else None

    def next(self, n: int) -> list[Row]:
        """See ``PromptSource.next``."""
        found = [self._row(self.at + i) for i in range(n)]
        self.at += n
        return found

    def _row(self, number: int) -> Row:
        if self.length is None:
            return Row(PROPOSE, index=number, place="the proposer's prompt")
        solver, letter, level, n = self.rows[number % self.length]
        task = [letter, level, HELD_OUT + n]
        text = make_question(letter, level, HELD_OUT + n).text
        return Row(text, metadata={PLAYER: solver, TASK: task}, index=number, place=f"task {letter}{level}")

    def state(self) -> dict[str, Any]:
        """See ``PromptSource.state``."""
        return {"at": self.at}

    def load_state(self, state: dict[str, Any]) -> None:
        """See ``PromptSource.load_state``."""
        self.at = int(state["at"])


#: Seed of the first held-out question. Seeds of training are numbers of samples, which start at 0.
HELD_OUT = 1 << 40


def make_generate(run: Run) -> GameFunction:
    """``--generate proposer``."""
    return GameFunction(run, ProposerGame(run.config.plugin("coevolution").attempts))


def make_prompts(run: Run, data: str, purpose: str) -> TaskPrompts:
    """``--prompts tasks``; ``--eval-prompts tasks --eval-prompt-data 8``: held-out questions per level."""
    if purpose == "train":
        return TaskPrompts()
    if not data.isdigit() or int(data) < 1:
        raise ConfigError(
            f"tasks takes the number of held-out questions per level as data, got {data!r}: --eval-prompt-data 8"
        )
    solvers = [p.name for p in run.policies if p.role == "train" and p.name.partition("-")[0] == "solver"]
    return TaskPrompts(int(data), tuple(solvers))
