"""A policy: one model being trained.

A run has one policy by default; co-evolution has several. What is true once a policy (its checkpoint, the version that
was synced, its namespace in a checkpoint) is here; its engine and its learner are ``PolicyParts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.data.sample import Sample


@dataclass(eq=False)
class Policy:
    """One model being trained, and how far it is.

    Attributes:
        hf_checkpoint: the checkpoint directory it starts from.
        name: names its checkpoint folder and prefixes its metrics when there are several.
        version: the last weight version synced; -1 before the first.
        trained: optimiser steps done, those of a warm start not counted.
    """

    hf_checkpoint: str = ""
    name: str = "policy"
    version: int = -1
    trained: int = 0

    def own(self, groups: list[list[Sample]]) -> list[Sample]:
        """The samples this policy learns from: those whose metadata names it, or name nobody."""
        return [s for group in groups for s in group if s.metadata.get("policy", self.name) == self.name]
