"""Records the log-probability and advantage that each token was trained with, for the run's saved samples."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from miles_core.contracts.runtime import TrainedTokens
from miles_core.contracts.trainer import Context, Loss, LossFunction, Output
from miles_core.data.batch import Batch

#: Batch scalar with the index of each sample in the rollout.
POSITION = "position"


class TokenRecorder:
    """Records advantages and the log-probabilities of the policy before the rollout's first optimiser step.

    If a separate pass computed the old policy's log-probabilities, these are used. Otherwise the rollout has a single optimiser
    step, and the loss wrapped with ``wrap_loss`` records the log-probabilities of that step.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._old: np.ndarray | None = None

    def wrap_loss(self, loss: LossFunction) -> LossFunction:
        """Wrap ``loss`` to record the log-probabilities of batches that have the scalar ``POSITION``."""

        def recording_loss(output: Output, batch: Batch, ctx: Context) -> Loss:
            if POSITION in batch.scalars and output.log_probs is not None:
                self._seen.append((batch.scalars[POSITION], batch.lengths, output.log_probs.detach()))
            return loss(output, batch, ctx)

        return recording_loss

    def start(self, batch: Batch, old: Tensor | None) -> None:
        """Start a rollout. ``old`` holds the old policy's log-probabilities, [T]; if None, the wrapped loss records them."""
        self._seen, self._old = [], None if old is None else old.float().cpu().numpy()
        if old is None:
            batch.scalars[POSITION] = torch.arange(len(batch))

    def tokens(self, batch: Batch) -> list[TrainedTokens]:
        """Return the recorded values of each sample; log-probabilities are None on a rank that computes no loss."""
        bounds = [0, *batch.lengths.cumsum(0).tolist()]
        log_probs = self._recorded_log_probs(len(batch)) if self._old is None else np.split(self._old, bounds[1:-1])
        advantages = np.split(batch.column("advantages").float().cpu().numpy(), bounds[1:-1])
        prompts = batch.prompt_lengths.tolist()
        self._seen, self._old = [], None
        return [
            TrainedTokens(None if own is None else own[prompt:], advantage[prompt:])
            for own, advantage, prompt in zip(log_probs[: len(batch)], advantages[: len(batch)], prompts, strict=True)
        ]

    def _recorded_log_probs(self, count: int) -> list[np.ndarray | None]:
        result: list[np.ndarray | None] = [None] * count
        for positions, lengths, log_probs in self._seen:
            parts = np.split(log_probs.float().cpu().numpy(), lengths.cumsum(0).cpu().numpy()[:-1])
            for position, part in zip(positions.tolist(), parts, strict=True):
                # a padding micro-batch without trained tokens repeats a sample; it comes last and is ignored
                if position < count and result[position] is None:
                    result[position] = part
        return result
