"""The probability that a policy wins Nim against perfect play, from its distribution over tokens instead of from sampled games.

From a won position only one move wins, and a perfect opponent answers each of them with one move. So the probability of a win is the product of the
probabilities of the winning moves along one conversation, which the game's own code produces here.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from miles_coevolution.nim import Nim, best_move, is_won, position
from miles_core.data import Sample
from miles_core.plugin import GenerationClient

_PILE = re.compile(r"(\d+):$")


class Winner:
    """In place of a rollout's ``ask``: plays the winning move, and multiplies the policy's probabilities of it.

    Args:
        model, tokenizer: the policy.
        pile: the position to start from.

    Attributes:
        probability: product so far.
    """

    def __init__(self, model: Any, tokenizer: Any, pile: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.probability = 1.0
        self.metrics: dict[str, float] = {}
        self._start = tokenizer.encode(position(pile), add_special_tokens=False)

    async def __call__(self, tokens: Sequence[int] = (), after: Any = None, **_: Any) -> Any:
        """Play one move; returns a turn with the attributes that the game reads."""
        import torch

        context = [*after.tokens, *tokens] if after is not None else self._start
        pile = _PILE.search(self.tokenizer.decode(context))
        assert pile is not None
        move = str(best_move(int(pile[1])))
        (token,) = self.tokenizer.encode(move, add_special_tokens=False)
        with torch.no_grad():
            logits = self.model(torch.tensor([context])).logits[0, -1].double()
        self.probability *= float(logits.softmax(-1)[token])
        return SimpleNamespace(response=SimpleNamespace(text=move), tokens=[*context, token])


def win_probability(model: Any, tokenizer: Any, pile: int) -> float:
    """Probability that the policy, which moves first, wins from ``pile`` at temperature 1; 0 from a lost position."""
    if not is_won(pile):
        return 0.0
    winner = Winner(model, tokenizer, pile)
    played = asyncio.run(Nim().evaluate(Sample(metadata={"pile": pile}), cast(GenerationClient, winner), ""))
    assert played.win == 1.0
    return winner.probability


def exact_score(checkpoint: Path, piles: Sequence[int]) -> float:
    """Mean probability of a win over the won positions among ``piles``, for a Hugging Face checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    model.float().eval()
    return statistics.fmean(win_probability(model, tokenizer, pile) for pile in piles if is_won(pile))
