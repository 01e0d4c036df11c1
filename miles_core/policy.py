"""A policy: one model being trained, with the parts that belong to it.

A run has one policy by default; co-evolution has several. Everything that exists once a policy (trainer, engine
route, sync version, checkpoint namespace) hangs here and not on the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.rollout.engine import Engine
    from miles_core.sync.transport import Transport


@dataclass
class Policy:
    """See the module's paragraph.

    Attributes:
        name: names its checkpoint folder and prefixes its metrics when there are several.
        hf_checkpoint: the checkpoint directory it starts from.
        learner: the trainer side (``miles_core.train.learner.Learner`` or a remote handle with its methods).
        engine: where its requests go.
        transport: moves encoded weights from trainer to engine.
        version: the last weight version synced; -1 before the first.
    """

    name: str = "policy"
    hf_checkpoint: str = ""
    learner: Any = field(default=None, repr=False)
    engine: Engine | None = field(default=None, repr=False)
    transport: Transport | None = field(default=None, repr=False)
    version: int = -1
