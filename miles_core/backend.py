"""What engines, trainers, transports, runtimes and schedules import; their manifests are made with ``miles_core.Plugin``.

The contracts, the data that crosses them, what a backend says about a number format, and what a runtime runs on every
trainer rank. ``miles_testing`` has the contracts as tests.
"""

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.checkpoint.rng import get_rng, put_rng
from miles_core.checkpoint.store import Store
from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine, EnginePart, PauseMode, Request, Response, Sampling
from miles_core.contracts.further_layer import FurtherLayer, further_layer
from miles_core.contracts.policy import Policy
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Learned, LearnerHandle, PolicyParts, Runtime, TopLogProbs, TrainedTokens
from miles_core.contracts.schedule import Position, Schedule
from miles_core.contracts.trainer import (
    GIVEN_ROUTES,
    OWN_ROUTES,
    Callbacks,
    Context,
    Forward,
    Loss,
    LossFunction,
    OptimizerStep,
    Output,
    Pass,
    Trainer,
    TrainerPart,
)
from miles_core.contracts.transport import SyncReport, Transport
from miles_core.data.batch import Batch, Ragged, collate
from miles_core.data.field import CANDIDATES, SAMPLING_SUPPORT
from miles_core.data.sample import Sample
from miles_core.data.unit import Encoded, Unit
from miles_core.data.world import ALONE, World, shares
from miles_core.errors import WorkerLost
from miles_core.plugin.detect import config_facts, model_facts, moe_layers
from miles_core.plugin.plan import Plan
from miles_core.plugin.worker import same_plan
from miles_core.precision.codec import Codec
from miles_core.precision.product import Products
from miles_core.precision.projection import project
from miles_core.precision.quantizer import BYTES, VALUES, FormatItself, Parity, Quantizer, SideParity, bounded
from miles_core.precision.schedule import PLAIN, Precisions, precisions
from miles_core.precision.snapshot import Snapshot, snapshot
from miles_core.redact import redact
from miles_core.rollout.collect import Collector, Interrupted
from miles_core.rollout.versions import age, staleness
from miles_core.run.prepare import accept
from miles_core.schedule.paused import paused
from miles_core.schedule.sync import SyncSchedule
from miles_core.sync.copy import CopyTransport
from miles_core.sync.precision import make_codec
from miles_core.train.auxiliary import trained_tokens, with_auxiliary
from miles_core.train.learner import Learner
from miles_core.train.optimizer import OptimizerConfig
from miles_core.train.share import Share, combined, divided, in_order
from miles_core.train.steps import optimiser_steps, step_count

__all__ = [
    "ALONE",
    "AS_TRAINED",
    "BYTES",
    "CANDIDATES",
    "GIVEN_ROUTES",
    "OWN_ROUTES",
    "PLAIN",
    "SAMPLING_SUPPORT",
    "VALUES",
    "Batch",
    "Callbacks",
    "CheckpointFiles",
    "Codec",
    "Collector",
    "Context",
    "CopyTransport",
    "Emulation",
    "Encoded",
    "Engine",
    "EnginePart",
    "FormatItself",
    "Forward",
    "FurtherLayer",
    "Interrupted",
    "Learned",
    "Learner",
    "LearnerHandle",
    "Loss",
    "LossFunction",
    "OptimizerConfig",
    "OptimizerStep",
    "Output",
    "Parity",
    "Pass",
    "PauseMode",
    "Plan",
    "Policy",
    "PolicyParts",
    "Position",
    "Precisions",
    "Products",
    "Quantizer",
    "Ragged",
    "Request",
    "Response",
    "Run",
    "Runtime",
    "Sample",
    "Sampling",
    "Schedule",
    "Share",
    "SideParity",
    "Snapshot",
    "Store",
    "SyncReport",
    "SyncSchedule",
    "TopLogProbs",
    "TrainedTokens",
    "Trainer",
    "TrainerPart",
    "Transport",
    "Unit",
    "WorkerLost",
    "World",
    "accept",
    "age",
    "bounded",
    "collate",
    "combined",
    "config_facts",
    "divided",
    "further_layer",
    "get_rng",
    "in_order",
    "make_codec",
    "model_facts",
    "moe_layers",
    "optimiser_steps",
    "paused",
    "precisions",
    "project",
    "put_rng",
    "redact",
    "same_plan",
    "shares",
    "snapshot",
    "staleness",
    "step_count",
    "trained_tokens",
    "with_auxiliary",
]
