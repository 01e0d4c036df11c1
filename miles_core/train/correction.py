"""Builds the inputs of corrections from a batch, which holds an optimiser step or one micro-batch of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from miles_core.algorithm.correction import CorrectionInputs
from miles_core.data.batch import Batch
from miles_core.data.column import are_columns
from miles_core.data.sample import Sample
from miles_core.errors import DataError, PluginError


def correction_inputs(
    batch: Batch, old: Tensor, sum: Callable[[Tensor], Tensor], log_probs: Tensor | None = None
) -> CorrectionInputs:
    """Build the inputs of ``wrap_correction``.

    Args:
        batch: a batch with the column ``advantages``.
        old: log-probabilities of the old policy, computed by the trainer, [T].
        sum: sums a tensor over ranks.
        log_probs: log-probabilities of the current policy, [T], if a correction needs them and they differ from ``old``.
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
    """Stand in for ``sum`` in corrections that declare ``Needs(whole_step=False)``: always raises PluginError."""
    raise PluginError(
        "a correction declared Needs(whole_step=False) but calls sum, which covers the optimiser step; declare whole_step=True"
    )


def check_rollout_log_probs(samples: Sequence[Sample]) -> None:
    """Raise DataError unless the engine reported a finite log-probability for every trained token."""
    columns = [sample.rollout_log_probs for sample in samples]
    if samples and are_columns(columns):  # usual case: one check of all
        whole = all(len(column) == s.response_length for column, s in zip(columns, samples, strict=True))
        if whole and np.isfinite(np.frombuffer(b"".join(columns), columns[0].typecode)).all():
            return
    for sample in samples:
        if not any(sample.mask):
            continue
        if sample.rollout_log_probs is None:
            raise DataError(
                f"sample {sample.index} has no rollout_log_probs, but the run weights tokens by them; make the engine report "
                "them, or remove corrections and --use-rollout-logprobs"
            )
        if len(sample.rollout_log_probs) != sample.response_length:
            raise DataError(
                f"sample {sample.index}: rollout_log_probs has {len(sample.rollout_log_probs)} entries for "
                f"{sample.response_length} response tokens"
            )
        values = np.asarray(sample.rollout_log_probs, np.float64)
        invalid = (~np.isfinite(values) & (np.asarray(sample.mask) != 0)).nonzero()[0]
        if len(invalid):
            raise DataError(
                f"sample {sample.index}: rollout_log_probs[{invalid[0]}] is {values[invalid[0]]}; a sampled token has a finite "
                "log-probability, so the engine's report is wrong"
            )
