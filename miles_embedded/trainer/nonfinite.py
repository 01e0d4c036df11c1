"""Find the first non-finite tensor of a failed optimizer step.

A step checks only the norm of its gradient. A failed step changes nothing, so computing its micro-batches again gives the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from miles_core.contracts.trainer import Context, LossFunction, Output
from miles_core.data.batch import Batch
from miles_core.train.loss import with_auxiliary
from miles_embedded.model.nonfinite import NonFiniteWatch, is_finite


def first_nonfinite_in_step(
    model: nn.Module,
    micro_batches: Iterable[tuple[Batch, Context]],
    count: int,
    forward: Callable[[Batch, Context], Output],
    loss: LossFunction,
    tokens: Tensor,
) -> str:
    """Compute every micro-batch of a failed step again, on every rank, and describe the first non-finite tensor with its micro-batch
    of ``count`` and samples; "" if each is finite. The gradients are not valid afterwards."""
    first = ""
    for number, (micro_batch, ctx) in enumerate(micro_batches, start=1):
        with NonFiniteWatch(model) as watch:
            output = forward(micro_batch, ctx)
            share = with_auxiliary(loss(output, micro_batch, ctx), output, tokens)
            found = watch.first or _column(micro_batch)
            if not found and output.log_probs is not None and not is_finite(output.log_probs):
                found = "the log-probs that the forward returned, from finite outputs of all modules,"
            if not found and not is_finite(share.value):
                found = "the loss itself, from finite log-probs and columns,"
            if share.value.requires_grad:
                share.value.backward()
                found = found or watch.first
        if found and not first:
            who = ", ".join(map(str, micro_batch.index.tolist()[:8])) + (", ..." if len(micro_batch) > 8 else "")
            first = f"{found} in micro-batch {number} of {count} (samples {who})"
    return first


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
