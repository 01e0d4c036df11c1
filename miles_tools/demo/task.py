"""Two-digit addition: prompts, held-out prompts and demonstrations, from a seed.

A prompt is ``37+58=`` and its label ``95``. The 8,100 sums of two numbers from 10 to 99 are split by unordered pair, so
that ``58+37=`` is never trained on when ``37+58=`` is held out. The demonstrations for the supervised warm start come
from a careless teacher who forgets each carry with a certain probability: imitation cannot exceed that teacher's accuracy, so the rest must
be learned from the reward.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

PROMPT_KEY = "prompt"
LABEL_KEY = "label"
RESPONSE_KEY = "response"

LOW, HIGH = 10, 100


@dataclass(frozen=True)
class TaskFiles:
    """Where ``write_task`` put the three files."""

    train: Path
    held_out: Path
    demonstrations: Path


def careless_sum(a: int, b: int, forgets: float, rng: random.Random) -> str:
    """Return ``a + b``, omitting each of the two carries with probability ``forgets``."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + (units >= 10 and rng.random() >= forgets)
    hundreds = int(tens >= 10 and rng.random() >= forgets)
    return str(hundreds * 100 + tens % 10 * 10 + units % 10)


def split_pairs(held_out: int, rng: random.Random) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (training pairs, ``held_out`` held-out pairs), shuffled; both orders of a pair are in the same list."""
    unordered = [(a, b) for a in range(LOW, HIGH) for b in range(a, HIGH)]
    if not 0 < held_out < len(unordered):
        raise ValueError(f"held_out must be between 1 and {len(unordered) - 1}, got {held_out}")
    rng.shuffle(unordered)
    flipped = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in unordered[:held_out]]
    train = [pair for a, b in unordered[held_out:] for pair in {(a, b), (b, a)}]
    train.sort()
    rng.shuffle(train)
    return train, flipped


def write_task(
    directory: str | Path, seed: int = 0, held_out: int = 512, demonstrations: int = 20_000, forgets: float = 0.7
) -> TaskFiles:
    """Write ``train.jsonl``, ``held_out.jsonl`` and ``demonstrations.jsonl`` into ``directory``.

    Args:
        directory: target directory, created if absent.
        seed: the same seed gives the same bytes.
        held_out: number of held-out prompts.
        demonstrations: number of demonstrations, drawn from the training pairs with replacement.
        forgets: probability with which the teacher forgets a carry.
    """
    rng = random.Random(seed)
    train, kept = split_pairs(held_out, rng)
    drawn = [rng.choice(train) for _ in range(demonstrations)]
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    files = TaskFiles(target / "train.jsonl", target / "held_out.jsonl", target / "demonstrations.jsonl")
    for path, pairs in ((files.train, train), (files.held_out, kept)):
        _write(path, [{PROMPT_KEY: f"{a}+{b}=", LABEL_KEY: str(a + b)} for a, b in pairs])
    _write(
        files.demonstrations,
        [{PROMPT_KEY: f"{a}+{b}=", RESPONSE_KEY: careless_sum(a, b, forgets, rng)} for a, b in drawn],
    )
    return files


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
