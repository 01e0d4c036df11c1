"""The game itself: its theory by exhaustive search, legal moves, and what an engine's answers become."""

import asyncio
from functools import cache
from types import SimpleNamespace

import pytest

from miles_coevolution.nim import Nim, Piles, best_move, is_won, make_prompts, read_move
from miles_core.contracts.engine import Response, Sampling
from miles_core.data import Sample
from miles_core.plugin import ConfigError, Policy
from miles_core.rollout.function import GenerationClient
from miles_testing import PromptSourceContract
from miles_tools.demo.model import make_tokenizer


@cache
def solved(pile):
    """By definition: a position is won if a move leads to a lost one."""
    return any(not solved(pile - move) for move in (1, 2, 3) if move <= pile)


def test_the_theory_is_that_of_an_exhaustive_search():
    for pile in range(1, 40):
        assert is_won(pile) == solved(pile)
        assert not solved(pile) or not solved(pile - best_move(pile))
        assert 1 <= best_move(pile) <= min(3, pile)


@pytest.mark.parametrize(
    ("text", "pile", "move"),
    [("2", 5, 2), (" 3", 3, 3), ("3", 2, None), ("0", 5, None), ("²", 5, None), ("", 5, None), ("x", 5, None)],
)
def test_only_legal_moves_count(text, pile, move):
    assert read_move(text, pile) == move


class TestPiles(PromptSourceContract):
    def make(self):
        return Piles(range(1, 6))


class TestHeldOut(PromptSourceContract):
    def make(self):
        return Piles(range(1, 6), ("one", "two"))


def test_held_out_positions_are_won_ones_for_each_policy():
    source = Piles(range(1, 6), ("one", "two"))
    rows = source.next(source.length)
    assert [(row.metadata["player"], row.metadata["pile"]) for row in rows] == [
        (p, n) for p in ("one", "two") for n in (1, 2, 3, 5)
    ]


@pytest.mark.parametrize("data", ["0-3", "5-2", "x", "3-"])
def test_a_range_of_piles_is_checked(data):
    run = SimpleNamespace(policies=[Policy("", "one")])
    with pytest.raises(ConfigError, match="smallest-largest"):
        make_prompts(run, data, "train")
    with pytest.raises(ConfigError, match="can be won by the first player"):
        make_prompts(run, "4", "evaluation")


TOKENIZER = make_tokenizer()


def play(pile, moves, evaluate=False):
    """Play Nim with these answers; the plays, the requests as (policy, text), and the metrics."""
    requests, answers = [], iter(moves)

    async def generation(tokens, sampling, policy, media=()):
        requests.append((policy, TOKENIZER.decode(tokens)))
        assert sampling.max_new_tokens == 1
        text = next(answers)
        ids = TOKENIZER.encode(text)
        return Response(ids, [-1.0] * len(ids), "length", text, [(0, 0)])

    sample = Sample(prompt=f"{pile}:", tokens=TOKENIZER.encode(f"{pile}:"), metadata={"pile": pile})
    ask = GenerationClient(sample, "one", generation, Sampling(8), TOKENIZER, None, TOKENIZER.decode)
    players = {"first": "one", "second": "two"}
    made = Nim().evaluate(sample, ask, "one") if evaluate else Nim().play(sample, ask, players)
    return asyncio.run(made), requests, ask.metrics


def test_a_game_is_one_conversation():
    (first, second), requests, metrics = play(7, "3131"[:3])
    assert requests == [("one", "7:"), ("two", "7:3 4:"), ("one", "7:3 4:1 3:")]
    assert (first.score, second.score) == (0.0, 1.0) or (first.score, second.score) == (1.0, 0.0)
    assert TOKENIZER.decode(first.last.tokens) == "7:3 4:1 3:3" and TOKENIZER.decode(second.last.tokens) == "7:3 4:1"
    assert (first.win, second.win) == (1.0, 0.0) and metrics == {"nim/optimal_moves": 1.0, "nim/legal": 1.0}


def test_illegal_moves_lose():
    (first, second), _, metrics = play(7, "x")
    assert (first.score, second.score, second.turns) == (0.0, 1.0, []) and second.last is first.last
    assert metrics == {"nim/optimal_moves": 0.0, "nim/legal": 0.0}
    (first, second), _, metrics = play(5, "23x")
    assert (first.score, second.score) == (0.0, 1.0)


def test_perfect_play_punishes_the_first_mistake():
    won, requests, _ = play(7, "33", evaluate=True)
    assert won.win == 1.0 and requests == [("one", "7:"), ("one", "7:3 4:1 3:")]
    lost, requests, metrics = play(7, "213", evaluate=True)
    assert lost.win == 0.0 and metrics["nim/optimal_moves"] < 1.0
