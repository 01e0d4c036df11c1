"""Find known names similar to an unknown one."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Similarity above which two names differ only by a typing error.
_SAME = 0.92


def find_nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three ``known`` names similar to ``word``.

    Similarly spelled names come first, best match first; if some are almost identical to ``word``, only those. Names that end with
    ``word`` follow (``--rollout-batch-size`` for ``--batch-size``). A number has no similar names.
    """
    if re.fullmatch(r"[-+]?[\d.]+", word):
        return []
    from difflib import SequenceMatcher, get_close_matches  # used for error messages only

    names = list(dict.fromkeys(known))
    cutoff = 0.6 if len(word) < 9 else 0.7  # one wrong letter changes a large part of a short name
    matches = get_close_matches(word, names, n=3, cutoff=cutoff)
    same = [name for name in matches if SequenceMatcher(None, name, word).ratio() > _SAME]
    matches = same or matches
    bare = word.strip("-").replace("_", "-")
    if len(bare) >= 4:
        matches += [name for name in names if name.replace("_", "-").endswith("-" + bare) and name not in matches]
    return matches[:3]


def did_you_mean(word: str, known: Iterable[str], before: str = "") -> str:
    """Return ``{before}did you mean a or b?``, or an empty string if no known name is similar to ``word``."""
    names = find_nearest(word, known)
    return f"{before}did you mean {' or '.join(names)}?" if names else ""
