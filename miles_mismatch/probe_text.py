"""The tokens that engine and trainer both score after the first sync.

One sequence is longer than every length at which the model begins to compute something else: sliding windows, attention chunks, the
original length of a rotary embedding, rows at which a temperature starts. Two short ones are scored in the same call. Half of the
tokens are the run's own prompts, the rest are drawn at random: unlikely tokens have log-probabilities far apart, which shows a
scale that is slightly wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_core.plugin.boundaries import boundaries, entries

#: Tokens of the long sequence at least, and at most (on a CPU: ``MOST_ON_CPU``), where the context allows it.
FEWEST, MOST, MOST_ON_CPU = 256, 4352, 1088
#: Tokens behind a boundary that must be there to judge it.
BEHIND = 64
#: Lengths of the short sequences.
SHORT = (48, 17)
#: Keys that hold ids of tokens that stand for something other than text.
_SPECIAL = ("_token_id", "_token_index")


@dataclass(frozen=True)
class ProbeText:
    """Token ids to score, and what they do not reach.

    Attributes:
        sequences: token ids.
        beyond: name in config.json -> length, for boundaries that lie beyond the longest sequence.
    """

    sequences: list[list[int]]
    beyond: dict[str, int]


def probe_text(
    config: Mapping[str, Any], prompts: Sequence[Sequence[int]], vocabulary: int, context: int, on_cpu: bool
) -> ProbeText:
    """Make the tokens.

    Args:
        config: the checkpoint's ``config.json``.
        prompts: token ids of prompts of the run; may be empty.
        vocabulary: ids to draw from are below this.
        context: the longest sequence that both sides take.
        on_cpu: a long sequence would take long.
    """
    most = min(context, MOST_ON_CPU if on_cpu else MOST)
    lengths = boundaries(config)
    reached = [length + BEHIND for length in lengths.values() if length + BEHIND <= most]
    longest = min(max([FEWEST, *reached]), most)
    draw = np.random.default_rng(0)
    special = _special(config)
    usual = np.array([token for token in range(vocabulary) if token not in special])
    text = [token for prompt in prompts for token in prompt][: longest // 2]
    first = text + usual[draw.integers(0, len(usual), longest - len(text))].tolist()
    short = [usual[draw.integers(0, len(usual), min(length, most))].tolist() for length in SHORT]
    return ProbeText([first, *short], {name: length for name, length in lengths.items() if length >= longest})


def _special(config: Mapping[str, Any]) -> set[int]:
    """Ids of tokens that stand for an image, an end or padding."""
    given = [value for name, value in entries(config) if name.endswith(_SPECIAL)]
    return {token for value in given for token in (value if isinstance(value, list) else [value]) if token is not None}
