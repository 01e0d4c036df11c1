"""Public names for trainers and for plugins that change training: the contract, its data types, and the pure functions of advantages,
corrections and losses.

Manifests are made with ``miles_core.plugin``. ``miles_testing`` has the contract as tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_core.algorithm.choices import ALGORITHMS as ALGORITHMS, loss_weights as loss_weights
    from miles_core.algorithm.correction import (
        Correct as Correct,
        Correction as Correction,
        CorrectionInputs as CorrectionInputs,
        compose_corrections as compose_corrections,
    )
    from miles_core.algorithm.objective import (
        AdvantageInputs as AdvantageInputs,
        Clip as Clip,
        Needs as Needs,
        Objective as Objective,
        PolicyLossInputs as PolicyLossInputs,
        TokenLoss as TokenLoss,
    )
    from miles_core.algorithm.reinforce_plus_plus import at_last_token as at_last_token
    from miles_core.data.batch import expand as expand
    from miles_core.checkpoint.hf_files import CheckpointFiles as CheckpointFiles
    from miles_core.checkpoint.rng import get_rng as get_rng, put_rng as put_rng
    from miles_core.checkpoint.tensor_file import record_files as record_files, write_tensors as write_tensors
    from miles_core.contracts.mtp_request import MtpRequest as MtpRequest, collect_mtp_request as collect_mtp_request
    from miles_core.contracts.runtime import (
        CHANGEABLE as CHANGEABLE,
        Learned as Learned,
        LearnerHandle as LearnerHandle,
    )
    from miles_core.contracts.trainer import (
        Callbacks as Callbacks,
        Context as Context,
        GIVEN_ROUTES as GIVEN_ROUTES,
        Loss as Loss,
        LossFunction as LossFunction,
        OWN_ROUTES as OWN_ROUTES,
        Output as Output,
        Pass as Pass,
        Trainer as Trainer,
        TrainerPart as TrainerPart,
    )
    from miles_core.data.world import ALONE as ALONE, World as World
    from miles_core.train.loss import ValueLoss as ValueLoss
    from miles_core.train.loss import trained_tokens as trained_tokens, with_auxiliary as with_auxiliary
    from miles_core.train.micro_batches import (
        MICRO_BATCH_TOKENS as MICRO_BATCH_TOKENS,
        micro_batch_limits as micro_batch_limits,
    )
    from miles_core.train.optimizer import OptimizerConfig as OptimizerConfig

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_core.algorithm.choices": "ALGORITHMS loss_weights",
        "miles_core.algorithm.correction": "Correct Correction CorrectionInputs compose_corrections",
        "miles_core.algorithm.objective": "AdvantageInputs Clip Needs Objective PolicyLossInputs TokenLoss",
        "miles_core.algorithm.reinforce_plus_plus": "at_last_token",
        "miles_core.data.batch": "expand",
        "miles_core.checkpoint.hf_files": "CheckpointFiles",
        "miles_core.checkpoint.rng": "get_rng put_rng",
        "miles_core.checkpoint.tensor_file": "record_files write_tensors",
        "miles_core.contracts.mtp_request": "MtpRequest collect_mtp_request",
        "miles_core.contracts.runtime": "CHANGEABLE Learned LearnerHandle",
        "miles_core.contracts.trainer": "Callbacks Context GIVEN_ROUTES Loss LossFunction OWN_ROUTES Output Pass "
        "Trainer TrainerPart",
        "miles_core.data.world": "ALONE World",
        "miles_core.train.loss": "ValueLoss trained_tokens with_auxiliary",
        "miles_core.train.micro_batches": "MICRO_BATCH_TOKENS micro_batch_limits",
        "miles_core.train.optimizer": "OptimizerConfig",
    },
)
__all__ = __dir__()
