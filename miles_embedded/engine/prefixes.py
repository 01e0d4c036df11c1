"""Prefixes in the cache: prompts, extended by generated tokens after a retract.

Rows share them. A prefix is computed when a row first needs it and is kept while any row uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from miles_core.data.media import Media
from miles_core.errors import MilesError
from miles_embedded.engine.attention import Prompts
from miles_embedded.engine.prompt_graphs import PromptGraphs
from miles_embedded.engine.runner import Runner, chunks, move_items


class Key(NamedTuple):
    """What determines a prefix: its tokens, the media (compared by digest) of its placeholders, and the variant of the model."""

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()
    variant: int = 0


@dataclass(eq=False)
class Prefix:
    """One prefix: its key, its slot, the hidden state [hidden] of its last token, the names of its recorded fields, and the difference
    between position and index of the tokens that follow."""

    key: Key
    slot: int
    hidden: Tensor
    fields: set[str]
    offset: int = 0


class Prefixes:
    """The prefixes in the slots of ``runner``'s cache, computed by ``graphs``."""

    def __init__(self, runner: Runner, graphs: PromptGraphs) -> None:
        self.runner, self.graphs = runner, graphs
        self._slots: list[Prefix] = []
        self._known: dict[Key, Prefix] = {}

    def compute(self, wanted: Mapping[Key, set[str]], computed: Callable[[Prompts], None] | None) -> dict[Key, Prefix]:
        """Look up prefixes, and compute those that are missing.

        Args:
            wanted: key -> names of fields that must be recorded for them. The result's ``fields`` lacks names that no module
                records.
            computed: called with the prefixes that were computed; None permits static passes.
        """
        known = self._known
        found = {k: known[k] for k, names in wanted.items() if k in known and names <= known[k].fields}
        fresh = [k for k in wanted if k not in found]
        names = set().union(*wanted.values())
        for chunk in chunks([len(k.tokens) for k in fresh]):
            keys = [fresh[i] for i in chunk]
            sequences, media = [k.tokens for k in keys], [k.media for k in keys]
            variants = [k.variant for k in keys]
            slots = self.runner.cache.add_prefixes([len(s) for s in sequences])
            if any(media):
                hidden, recorded, offsets = self.runner.fill_media(sequences, media, slots, names, variants)
            else:
                hidden, recorded = self.graphs.fill(sequences, slots, names, variants, computed)
                offsets = [0] * len(keys)
            for i, key in enumerate(keys):
                prefix = found[key] = known[key] = Prefix(key, int(slots[i]), hidden[i], recorded, offsets[i])
                self._slots.append(prefix)
        return found

    def apply_moves(self, gone: np.ndarray, where: np.ndarray, sources: np.ndarray) -> None:
        """Apply freed and moved prompt slots, see ``Cache.remove_rows``."""
        for slot in gone.tolist():
            prefix = self._slots[slot]
            if prefix.key in self._known and self._known[prefix.key] is prefix:
                del self._known[prefix.key]
        move_items(self._slots, where, sources, self.runner.cache.prefixes.size)

    def retire(self, variant: int) -> None:
        """Stop sharing the current prefixes of a variant after a change of its weights; rows that use one keep it."""
        self._known = {key: prefix for key, prefix in self._known.items() if key.variant != variant}
        self.graphs.weights_changed()

    def clear(self) -> None:
        """Forget all prefixes, because the cache is emptied."""
        self._known.clear()
        self._slots.clear()
        self.graphs.clear()


def missing_fields_error(names: set[str]) -> MilesError:
    """Make the error for a request with fields that no module records."""
    return MilesError(
        f"a request asks for {', '.join(sorted(names))}, but no module of the engine's model recorded it; "
        "the plugin that declares the field must hook the rollout model (on_model with role rollout or shared)"
    )
