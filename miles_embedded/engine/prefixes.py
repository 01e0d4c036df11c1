"""The prefixes in the cache that rows share: a prompt, extended by generated tokens after a retract.

A prefix is computed when a row first needs it and is kept while any row uses it.
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
#: Largest number of prefix tokens, padding included, computed in one call.
_TOKENS = 16384


@dataclass(eq=False)
class Prefix:
    """One prefix: its tokens, its slot, the hidden state [hidden] of its last token and the names of its recorded fields."""

    key: Key
    slot: int
    hidden: Tensor
    fields: set[str]


class Prefixes:
    """The prefixes in the slots of ``runner``'s cache."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._slots: list[Prefix] = []
        self._known: dict[Key, Prefix] = {}

    def compute(self, wanted: Mapping[Key, set[str]], computed: Callable[[Prompts], None]) -> dict[Key, Prefix]:
        """Look up prefixes, and compute those that are missing.

        Args:
            wanted: tokens -> names of fields that must be recorded for them. The result's ``fields`` lacks names that no module
                records.
            computed: called with the prefixes that were computed.
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

    def apply_moves(self, gone: np.ndarray, where: np.ndarray, sources: np.ndarray) -> None:
        """Apply freed and moved prompt slots, see ``Cache.remove_rows``."""
        for slot in gone.tolist():
            prefix = self._slots[slot]
            if prefix.key in self._known and self._known[prefix.key] is prefix:
                del self._known[prefix.key]
        move_items(self._slots, where, sources, self.runner.cache.prefixes.size)

    def retire(self) -> None:
        """Stop sharing the current prefixes after a change of weights; rows that use one keep it."""
        self._known.clear()

    def clear(self) -> None:
        """Forget all prefixes after the cache was emptied."""
        self._known.clear()
        self._slots.clear()


def missing_fields_error(names: set[str]) -> MilesError:
    """Make the error for a request with fields that no module records."""
    return MilesError(
        f"a request asks for {', '.join(sorted(names))}, but no module of the engine's model recorded it; "
        "the plugin that declares the field must hook the rollout model (on_model with role rollout or shared)"
    )


def chunks(lengths: Sequence[int]) -> list[list[int]]:
    """Group indices by similar length; a group has at most _TOKENS tokens with padding, or a single sequence."""
    out: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if out and (len(out[-1]) + 1) * lengths[i] <= _TOKENS:
            out[-1].append(i)
        else:
            out.append([i])
    return out
