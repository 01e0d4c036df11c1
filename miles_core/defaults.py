"""What a run consists of unless a plugin provides another part. The manifest of core (``plugin.core``) names these functions and classes.

Engine, trainer and model come from a backend, which is a plugin; one ships in the same wheel.
"""

# Where trainer, engine and rollouts run.
from miles_core.run.inline import make_runtime as make_inline_runtime

# The order of generation and training.
from miles_core.schedule.ahead import make_schedule as make_ahead_schedule
from miles_core.schedule.continuous import make_schedule as make_async_schedule
from miles_core.schedule.sync import SyncSchedule

# One response per sample, and its reward.
from miles_core.rollout.function import SingleTurn
from miles_core.reward.text_rules import make_boxed, make_exact, make_f1

# The update of the weights, and how they reach an engine in the same process.
from miles_core.train.adamw import make_optimizer as make_adamw
from miles_core.sync.push import CopyTransport

# Comparison of engine and trainer after each sync.
from miles_core.mismatch.weights_arrived import make_check as make_weights_check
from miles_core.mismatch.first_sync import make_check as make_first_sync_check
from miles_core.mismatch.at_sync import make_check as make_sync_check

__all__ = [
    "CopyTransport",
    "SingleTurn",
    "SyncSchedule",
    "make_adamw",
    "make_ahead_schedule",
    "make_async_schedule",
    "make_boxed",
    "make_exact",
    "make_f1",
    "make_first_sync_check",
    "make_inline_runtime",
    "make_sync_check",
    "make_weights_check",
]
