"""What training saw of each token of a rollout, for those who keep samples on disk. It costs no pass of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from miles_core.contracts.runtime import TrainedTokens
from miles_core.contracts.trainer import Context, Loss, LossFunction, Output
from miles_core.data.batch import Batch

#: Scalar of a batch: the position of each sample among those of the rollout.
POSITION = "position"


class TokenRecorder:
    """Collects advantages and the log-probabilities of the policy as the rollout found it.

    These are the old policy's where they were computed in a pass of their own. Otherwise the only optimiser step of the rollout computes
    them on its way, and a ``watched`` loss notes them.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._old: np.ndarray | None = None

    def watched(self, loss: LossFunction) -> LossFunction:
        """``loss``, noting the log-probabilities of batches that carry ``POSITION``."""

        def noting(output: Output, batch: Batch, ctx: Context) -> Loss:
            if POSITION in batch.scalars and output.log_probs is not None:
                self._seen.append((batch.scalars[POSITION], batch.lengths, output.log_probs.detach()))
            return loss(output, batch, ctx)

        return noting

    def start(self, batch: Batch, old: Tensor | None) -> None:
        """A rollout begins. ``old`` are the trainer's log-probabilities of the old policy, [T]; without them losses are watched."""
        self._seen, self._old = [], None if old is None else old.float().cpu().numpy()
        if old is None:
            batch.scalars[POSITION] = torch.arange(len(batch))

    def tokens(self, batch: Batch) -> list[TrainedTokens]:
        """What was seen of each sample of the rollout; log-probabilities are None on a rank that computes no loss."""
        bounds = [0, *batch.lengths.cumsum(0).tolist()]
        log_probs = self._watched_samples(len(batch)) if self._old is None else np.split(self._old, bounds[1:-1])
        advantages = np.split(batch.column("advantages").float().cpu().numpy(), bounds[1:-1])
        prompts = batch.prompt_lengths.tolist()
        self._seen, self._old = [], None
        return [
            TrainedTokens(None if own is None else own[prompt:], advantage[prompt:])
            for own, advantage, prompt in zip(log_probs[: len(batch)], advantages[: len(batch)], prompts, strict=True)
        ]

    def _watched_samples(self, count: int) -> list[np.ndarray | None]:
        found: list[np.ndarray | None] = [None] * count
        for positions, lengths, log_probs in self._seen:
            parts = np.split(log_probs.float().cpu().numpy(), lengths.cumsum(0).cpu().numpy()[:-1])
            for position, part in zip(positions.tolist(), parts, strict=True):
                # a micro-batch that trains nothing repeats a sample, and comes last
                if position < count and found[position] is None:
                    found[position] = part
        return found
