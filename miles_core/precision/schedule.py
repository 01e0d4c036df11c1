"""From when on a run computes in its number format: the warm-up.

Both sides start without quantisation and switch together when ``--warmup-steps`` optimiser steps are done. A rollout
and the steps that learn from it share one precision, so the switch is made between two rollout steps. The phase follows
from the number of optimiser steps alone, which every checkpoint holds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.config import Config

log = logging.getLogger(__name__)

#: The model copy as it is: no number format.
PLAIN = "bf16"


@dataclass(frozen=True)
class Precisions:
    """What each side computes in: a format's name or ``bf16``."""

    rollout: str
    train: str


def precisions(config: Config, trained: int) -> Precisions:
    """What both sides compute in after ``trained`` optimiser steps."""
    if trained < config.precision.warmup_steps:
        return Precisions(config.precision.warmup_precision, config.precision.warmup_precision)
    return Precisions(config.rollout.precision, config.train.precision)
