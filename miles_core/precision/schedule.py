"""The precision warm-up: determines from which step a run uses its number format.

Both sides start without quantisation and switch together after ``--warmup-steps`` optimiser steps. A rollout and the training steps on
its samples use the same precision, so the switch happens between two rollout steps. It depends only on the number of optimiser
steps, which every checkpoint contains.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.config import Config

log = logging.getLogger(__name__)

#: Precision without a number format: the BF16 model copy.
PLAIN = "bf16"


@dataclass(frozen=True)
class Precisions:
    """Precision of each side: a format's name or ``bf16``."""

    rollout: str
    train: str


def precisions(config: Config, trained: int) -> Precisions:
    """Return the precisions of both sides after ``trained`` optimiser steps."""
    if trained < config.precision.warmup_steps:
        return Precisions(config.precision.warmup_precision, config.precision.warmup_precision)
    return Precisions(config.rollout.precision, config.train.precision)
