"""Creates the tokens that engine and trainer both score after the first sync.

One sequence is longer than every length at which the model's computation changes: sliding windows, attention chunks, the original
length of a rotary embedding, the position at which a temperature starts. Two short sequences are scored in the same call. Half of the
tokens come from the run's prompts, the rest are random: random tokens have a wide range of log-probabilities, which reveals a slightly
wrong scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_core.plugin.boundaries import boundaries, entries

#: Minimum and maximum length of the long sequence (maximum on a CPU: ``MOST_ON_CPU``), if the context allows it.
FEWEST, MOST, MOST_ON_CPU = 256, 4352, 1088
#: Number of tokens after a boundary that are needed to check it.
BEHIND = 64
#: Lengths of the short sequences; the first one is repeated until there are ``TOTAL`` tokens, or ``_VISITS`` for each group of experts.
SHORT = (64, 17)
TOTAL, _VISITS = 1024, 16
#: Suffixes of configuration keys with ids of tokens that do not represent text.
_SPECIAL = ("_token_id", "_token_index")


@dataclass(frozen=True)
class ProbeText:
    """Token ids to score, and the boundaries that they do not cover.

    Attributes:
        sequences: token ids.
        beyond: name in config.json -> length, for boundaries beyond the longest sequence.
    """

    sequences: list[list[int]]
    beyond: dict[str, int]


def probe_text(
    config: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    vocabulary: int,
    context: int,
    on_cpu: bool,
    groups: int = 0,
    attempt: int = 0,
) -> ProbeText:
    """Create the token ids.

    Args:
        config: the checkpoint's ``config.json``.
        prompts: token ids of prompts of the run; may be empty.
        vocabulary: exclusive upper bound of random token ids.
        context: maximum sequence length of both sides.
        on_cpu: limit the long sequence to ``MOST_ON_CPU``, because scoring is slow.
        groups: number of experts for each one that a token chooses; 0 without experts.
        attempt: number of the text; each has other random tokens.
    """
    most = min(context, MOST_ON_CPU if on_cpu else MOST)
    lengths = boundaries(config)
    reached = [length + BEHIND for length in lengths.values() if length + BEHIND <= most]
    longest = min(max([FEWEST, *reached]), most)
    draw = np.random.default_rng(attempt)
    special = _find_special(config)
    usual = np.array([token for token in range(vocabulary) if token not in special])
    text = [token for prompt in prompts for token in prompt][: longest // 2]
    wanted = [longest - len(text), *(min(length, most) for length in SHORT)]
    count = max(TOTAL, min(_VISITS * groups, MOST)) - sum(wanted) - len(text)
    wanted += [wanted[1]] * max(-(-count // wanted[1]), 0)
    tokens = _draw(usual, sum(wanted), draw)
    first, *short = np.split(tokens, np.cumsum(wanted)[:-1])
    sequences = [text + first.tolist(), *(each.tolist() for each in short)]
    return ProbeText(sequences, {name: length for name, length in lengths.items() if length >= longest})


def _draw(tokens: np.ndarray, count: int, draw: np.random.Generator) -> np.ndarray:
    """Draw ``count`` of ``tokens``, one from each of as many equal parts, in random order."""
    return draw.permutation(tokens[((np.arange(count) + draw.random(count)) * len(tokens) / count).astype(np.int64)])


def _find_special(config: Mapping[str, Any]) -> set[int]:
    """Return the ids of tokens that represent an image, an end or padding."""
    given = [value for name, value in entries(config) if name.endswith(_SPECIAL)]
    return {token for value in given for token in (value if isinstance(value, list) else [value]) if token is not None}
