"""A policy: one model being trained, with the parts that belong to it.

A run has one policy by default; co-evolution has several. Everything that exists once a policy (trainer, engine
route, sync version, checkpoint namespace) hangs here and not on the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.runtime import LearnerHandle
    from miles_core.data.sample import Sample
    from miles_core.mismatch.parity import SideParity
    from miles_core.precision.schedule import Precisions


@dataclass
class Policy:
    """See the module's paragraph.

    Attributes:
        name: names its checkpoint folder and prefixes its metrics when there are several.
        hf_checkpoint: the checkpoint directory it starts from.
        learner: the trainer side, a ``miles_core.contracts.runtime.LearnerHandle``.
        engine: where its requests go.
        version: the last weight version synced; -1 before the first.
        trained: optimiser steps done, those of a warm start not counted.
        parity: how each side with a number format quantises, measured when it was built.
        precisions: what its two sides compute in now; None is what they started with.
    """

    name: str = "policy"
    hf_checkpoint: str = ""
    learner: LearnerHandle | None = field(default=None, repr=False)
    engine: Engine | None = field(default=None, repr=False)
    version: int = -1
    trained: int = 0
    parity: Sequence[SideParity] = ()
    precisions: Precisions | None = None

    def own(self, groups: list[list[Sample]]) -> list[Sample]:
        """The samples this policy learns from: those whose metadata names it, or name nobody."""
        return [s for group in groups for s in group if s.metadata.get("policy", self.name) == self.name]
