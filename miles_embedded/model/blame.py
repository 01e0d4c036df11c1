"""Finding the first tensor that is not finite.

Checking every tensor of every step would cost what it could save. So a step only checks its gradient's norm, which no NaN
or infinity escapes, and then the same micro-batches are computed again with eyes on every module: the first output that
is not finite in the forward pass, else the first gradient in the backward pass, is where it began. Nothing was changed by
the failed step, so the second computation meets the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from miles_core.data.batch import Batch
from miles_core.train.auxiliary import with_auxiliary

if TYPE_CHECKING:
    from miles_core.contracts.trainer import LossFunction
    from miles_embedded.trainer.trainer import EmbeddedTrainer


class Watch:
    """While open, looks at every module's outputs and their gradients.

    Attributes:
        first: a description of the first tensor that was not finite; empty while all were.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.first = model, ""
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_hook(self._look(name or type(module).__name__)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _look(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not self.first and not _finite(tensor):
                    self.first = f"the output of {name} {_describe(tensor)}{_because(name, module, args)}"
                if tensor.requires_grad:
                    self._handles.append(tensor.register_hook(self._look_back(name)))

        return hook

    def _look_back(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            if not self.first and not _finite(gradient):
                self.first = f"the gradient of the output of {name} {_describe(gradient)}"

        return hook


def first_in_step(trainer: EmbeddedTrainer, batch: Batch, loss: LossFunction, tokens: Tensor) -> str:
    """Compute every micro-batch of a failed step again; a clause that names the first tensor that is not finite, the
    micro-batch and its samples. Gradients are cleared afterwards."""
    splits = trainer._split(batch)
    for number, samples in enumerate(splits, start=1):
        micro_batch, ctx = trainer._prepare(batch, samples, "train", trainer.config.entropy)
        with Watch(trainer.model) as watch:
            output = trainer.parts.forward(trainer.model, micro_batch, ctx)
            share = with_auxiliary(loss(output, micro_batch, ctx), output, tokens)
            found = watch.first or _column(micro_batch)
            if not found and not _finite(share.value):
                found = "the loss itself, from finite log-probs and columns,"
            if not found and share.value.requires_grad:
                share.value.backward()
                found = watch.first
        trainer.optimizer.zero_grad()
        if found:
            who = ", ".join(map(str, micro_batch.index.tolist()[:8])) + (", ..." if len(micro_batch) > 8 else "")
            return f"{found} in micro-batch {number} of {len(splits)} (samples {who})"
    return f"all {len(splits)} micro-batches are finite one by one, so their sum overflows"


def first_in(model: nn.Module, body: Any) -> str:
    """The first tensor that is not finite while ``body()`` runs ``model``; empty when all are."""
    with Watch(model) as watch:
        body()
    return watch.first


def _column(batch: Batch) -> str:
    """A column of numbers that is not finite where something is trained."""
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _describe(tensor: Tensor) -> str:
    bad = ~tensor.detach().isfinite()
    first = bad.nonzero()[0].tolist()
    value = tensor.detach()[tuple(first)].item()
    return f"{list(tensor.shape)} holds {int(bad.sum())} values that are not finite, the first ({value}) at {first},"


def _because(name: str, module: nn.Module, args: Any) -> str:
    """A cause that lies in the module itself."""
    for own, parameter in module.named_parameters(recurse=False):
        if not _finite(parameter):
            return f" because its parameter {name}.{own} does,"
    if all(_finite(t) for t in _tensors(args)):
        return " from finite inputs,"
    return ""
