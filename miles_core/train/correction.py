"""What corrections see of a batch: an optimiser step, or a micro-batch of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from miles_core.algorithm.correction import CorrectionInputs
from miles_core.data.batch import Batch
from miles_core.data.sample import Sample
from miles_core.errors import DataError, PluginError


def correction_inputs(
    batch: Batch, old: Tensor, sum: Callable[[Tensor], Tensor], log_probs: Tensor | None = None
) -> CorrectionInputs:
    """The inputs of ``wrap_correction``.

    Args:
        batch: with the column ``advantages``.
        old: [T] log-probabilities of the old policy by the trainer's model.
        sum: adds a tensor over ranks.
        log_probs: [T] of the current policy, where a correction needs them and they are not the old ones.
    """
    return CorrectionInputs(
        old_log_probs=old,
        rollout_log_probs=batch.rollout_log_probs,
        mask=batch.mask,
        advantages=batch.column("advantages"),
        lengths=batch.lengths,
        group=batch.group,
        rollout=batch.rollout,
        log_probs=log_probs,
        sum=sum,
    )


def refuse_sum(value: Tensor) -> Tensor:
    """``sum`` for a correction that said it looks at each sample by itself."""
    raise PluginError(
        "a correction declared Needs(whole_step=False) and asks for a sum over the optimiser step; declare whole_step=True"
    )


def check_rollout_log_probs(samples: Sequence[Sample]) -> None:
    """DataError unless every trained token has a finite log-probability of the engine."""
    for sample in samples:
        if not any(sample.mask):
            continue
        if sample.rollout_log_probs is None:
            raise DataError(
                f"sample {sample.index} has no rollout_log_probs, and the run weighs tokens by them; let the engine report "
                "them, or leave out corrections and --use-rollout-logprobs"
            )
        if len(sample.rollout_log_probs) != sample.response_length:
            raise DataError(
                f"sample {sample.index}: rollout_log_probs has {len(sample.rollout_log_probs)} entries for "
                f"{sample.response_length} response tokens"
            )
        values = np.asarray(sample.rollout_log_probs, np.float64)
        wrong = (~np.isfinite(values) & (np.asarray(sample.mask) != 0)).nonzero()[0]
        if len(wrong):
            raise DataError(
                f"sample {sample.index}: rollout_log_probs[{wrong[0]}] is {values[wrong[0]]}; a sampled token has a finite "
                "log-probability, so the engine's report is wrong"
            )
