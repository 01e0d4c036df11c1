"""The prefixes in the cache, which rows share: a prompt, and behind a retract what was generated of it as well.

A prefix is computed when the first row needs it, and kept while any row does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from miles_core.errors import MilesError
from miles_embedded.engine.cache import move_items
from miles_embedded.engine.prompts import Prompts
from miles_embedded.engine.runner import Runner

Key = tuple[int, ...]
#: Prefix tokens, padding included, computed in one call.
_TOKENS = 16384


@dataclass(eq=False)
class Prefix:
    """One prefix: its tokens, its slot, its last token's hidden state [hidden], and the fields recorded for it."""

    key: Key
    slot: int
    hidden: Tensor
    fields: set[str]


class Prefixes:
    """Follows the prefix slots of ``runner``'s cache."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._slots: list[Prefix] = []
        self._known: dict[Key, Prefix] = {}

    def compute(self, wanted: Mapping[Key, set[str]], computed: Callable[[Prompts], None]) -> dict[Key, Prefix]:
        """Find or compute prefixes.

        Args:
            wanted: tokens -> names of fields that must be recorded for them. A name that no module records is missing
                from the result's ``fields``.
            computed: told about prefixes that had to be computed.
        """
        known = self._known
        found = {k: known[k] for k, names in wanted.items() if k in known and names <= known[k].fields}
        fresh = [k for k in wanted if k not in found]
        names = set().union(*wanted.values())
        for chunk in chunks([len(k) for k in fresh]):
            keys = [fresh[i] for i in chunk]
            slots, hidden, recorded = self.runner.prefixes(keys, names, computed)
            for i, key in enumerate(keys):
                prefix = found[key] = known[key] = Prefix(key, int(slots[i]), hidden[i], recorded)
                self._slots.append(prefix)
        return found

    def moved(self, gone: np.ndarray, where: np.ndarray, whence: np.ndarray) -> None:
        """Slots were freed and others moved, see ``Cache.remove_rows``."""
        for slot in gone.tolist():
            prefix = self._slots[slot]
            if prefix.key in self._known and self._known[prefix.key] is prefix:
                del self._known[prefix.key]
        move_items(self._slots, where, whence, self.runner.cache.prefixes.size)

    def retire(self) -> None:
        """The weights changed: rows keep their prefixes, but no new row may share one."""
        self._known.clear()

    def clear(self) -> None:
        """The cache was emptied."""
        self._known.clear()
        self._slots.clear()


def not_recorded(names: set[str]) -> MilesError:
    """What a request is told that asks for fields which no prefix has."""
    return MilesError(
        f"a request asks for {', '.join(sorted(names))}, but nothing in the engine's model recorded it; "
        "the plugin that declares the field must hook the rollout model (on_model with role rollout or shared)"
    )


def chunks(lengths: Sequence[int]) -> list[list[int]]:
    """Indexes in runs of similar length, each at most _TOKENS with its padding (or one sequence)."""
    out: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if out and (len(out[-1]) + 1) * lengths[i] <= _TOKENS:
            out[-1].append(i)
        else:
            out.append([i])
    return out
