"""The known names that an unknown one is like."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

#: How much two names are alike of which one is the other with a slip.
_SAME = 0.92


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """At most three of the ``known`` names: those that look like ``word``, best first (where one is all but the same, only such),
    then those that end with it, as ``--rollout-batch-size`` does for ``--batch-size``. None for a number: another one is not what was meant."""
    if re.fullmatch(r"[-+]?[\d.]+", word):
        return []
    names = list(dict.fromkeys(known))
    alike = 0.6 if len(word) < 9 else 0.7  # one wrong letter is much of a short name
    found = get_close_matches(word, names, n=3, cutoff=alike)
    same = [name for name in found if SequenceMatcher(None, name, word).ratio() > _SAME]
    found = same or found
    bare = word.strip("-").replace("_", "-")
    if len(bare) >= 4:
        found += [name for name in names if name.replace("_", "-").endswith("-" + bare) and name not in found]
    return found[:3]


def did_you_mean(word: str, known: Iterable[str], before: str = "") -> str:
    """``did you mean a or b?`` with ``before`` in front of it, or nothing where no known name is like ``word``."""
    names = nearest(word, known)
    return f"{before}did you mean {' or '.join(names)}?" if names else ""
