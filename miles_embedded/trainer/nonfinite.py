"""Find the first non-finite tensor of a failed optimizer step.

A step checks only the norm of its gradient. A failed step changes nothing, so computing its micro-batches again gives the same
numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from miles_core.data.batch import Batch
from miles_core.train.loss import with_auxiliary
from miles_embedded.model.nonfinite import NonFiniteWatch, is_finite

if TYPE_CHECKING:
    from miles_core.contracts.trainer import LossFunction
    from miles_embedded.trainer.trainer import EmbeddedTrainer


def first_nonfinite_in_step(trainer: EmbeddedTrainer, batch: Batch, loss: LossFunction, tokens: Tensor) -> str:
    """Compute every micro-batch of a failed step again, on every rank, and describe the first non-finite tensor with its micro-batch
    and samples. Clears the gradients."""
    first = ""
    every = trainer.micro_batches(batch, "train", trainer.config.entropy)
    for number, (_, micro_batch, ctx) in enumerate(every, start=1):
        with NonFiniteWatch(trainer.model) as watch:
            output = trainer.parallel.call(trainer.callbacks.forward, trainer.model, micro_batch, ctx)
            share = with_auxiliary(loss(output, micro_batch, ctx), output, tokens)
            found = watch.first or _column(micro_batch)
            if not found and output.log_probs is not None and not is_finite(output.log_probs):
                found = "the log-probs that the forward returned, from finite outputs of all modules,"
            if not found and not is_finite(share.value):
                found = "the loss itself, from finite log-probs and columns,"
            if share.value.requires_grad:
                share.value.backward()
                found = found or watch.first
        trainer.optimizer.zero_grad()
        if found and not first:
            who = ", ".join(map(str, micro_batch.index.tolist()[:8])) + (", ..." if len(micro_batch) > 8 else "")
            first = f"{found} in micro-batch {number} of {len(trainer.split(batch))} (samples {who})"
    first = trainer.parallel.first_text(first)  # collective: every rank must complete the loop before one raises
    return first or "each micro-batch is finite, so their sum overflows"


def _column(batch: Batch) -> str:
    """Describe the first column with a non-finite value at a trained token; "" if there is none."""
    trained = batch.mask.bool()
    for name, values in batch.columns.items():
        if isinstance(values, Tensor) and values.is_floating_point() and len(values) == len(trained):
            bad = (~values.isfinite()).reshape(len(values), -1).any(-1) & trained
            if bool(bad.any()):
                at = int(bad.nonzero()[0])
                sample = int(batch.owner[at])
                position = at - int(batch.starts[sample]) - int(batch.prompt_lengths[sample])
                return (
                    f"column {name} is {float(values[at].flatten()[0])} at response token {position} of sample "
                    f"{int(batch.index[sample])}, not computed by this pass,"
                )
    return ""
