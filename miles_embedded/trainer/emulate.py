"""The embedded trainer's forward with some of the engine's properties (``miles_core.contracts.emulation``).

Weights are written into the trainer's model in place and put back bit for bit, so every hook on it stays in force; the
copy that is kept meanwhile lies in host memory. The optimiser's masters are never touched where they are apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from miles_core.contracts.emulation import Emulation
from miles_core.data.unit import Encoded
from miles_core.errors import MilesError
from miles_core.precision.codec import Codec
from miles_core.precision.snapshot import Snapshot
from miles_embedded.model.kv_dtype import KV_DTYPE, check_kv_dtype
from miles_embedded.model.load_units import load_units
from miles_embedded.model.sharded import local_shard
from miles_embedded.model.views import export, sources
from miles_embedded.quantized.activation import RoundedInputs

if TYPE_CHECKING:
    from miles_embedded.trainer.trainer import EmbeddedTrainer


@contextmanager
def emulating(
    trainer: EmbeddedTrainer, emulation: Emulation, codec: Codec, snapshot: Snapshot | None = None
) -> Iterator[None]:
    """While this is open, ``trainer.log_probs`` of the policy's model has the properties asked for.

    Args:
        trainer: its model is as before when this closes.
        emulation: the switches.
        codec: the rollout's.
        snapshot: weights put aside, for the switch of that name.

    Raises:
        MilesError: nothing was kept, ``held`` or ``through`` is no embedded engine of this process, or the format does
            not say how it rounds activations.
    """
    with ExitStack() as stack:
        model = trainer.model
        if emulation.snapshot:
            if snapshot is None:
                raise MilesError("no weights of an earlier version were kept")
            stack.enter_context(_weights(model, snapshot.units, snapshot.codec))
        elif emulation.held is not None:
            plain = Codec()
            stack.enter_context(_weights(model, plain.encode(export(_model_of(emulation.held))), plain))
        elif emulation.encoded:
            stack.enter_context(_weights(model, codec.encode(export(model)), codec))
        if emulation.activations:
            stack.enter_context(_rounded_inputs(trainer.model, codec))
        if emulation.kv_dtype:
            stack.enter_context(trainer.scoring_with(attached={KV_DTYPE: check_kv_dtype(emulation.kv_dtype)}))
        if emulation.through is not None:
            if emulation.emulated_products:
                stack.enter_context(emulation.through.emulated_products())
            stack.enter_context(trainer.scoring_with(_model_of(emulation.through)))
        yield


def _model_of(engine: Any) -> nn.Module:
    model = getattr(engine, "model", None)
    if not isinstance(model, nn.Module):
        raise MilesError(f"{type(engine).__name__} does not run its model in the trainer's process")
    return model


@contextmanager
def _weights(model: nn.Module, units: Iterable[Encoded], codec: Codec) -> Iterator[None]:
    """``model`` holds the weights in ``units`` as ``codec`` decodes them."""
    own: dict[str, Tensor] = {n: local_shard(t).tensor for n, t in sources(model).items()}
    kept = {n: t.to("cpu", copy=True) for n, t in own.items()}
    try:
        load_units(model, units, codec.decode)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(kept[name])


@contextmanager
def _rounded_inputs(model: nn.Module, codec: Codec) -> Iterator[None]:
    """Layers with quantised weights read their input as the format's matrix products do."""
    if codec.format is None:
        raise MilesError("the engine's weights have no number format, so none rounds activations")
    inputs = RoundedInputs(model, codec)
    try:
        yield
    finally:
        inputs.remove()
