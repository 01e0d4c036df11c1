"""Emulate properties of the engine in the trainer's forward (``miles_core.contracts.emulation``).

Weights are written in place to the trainer's model and restored bit for bit, so all hooks on it remain active. The copy for restoring
is in host memory. Separate optimizer masters are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from miles_core.contracts.emulation import Emulation
from miles_core.data.weight_unit import Encoded
from miles_core.errors import MilesError
from miles_core.precision.codec import Codec
from miles_core.precision.snapshot import Snapshot
from miles_embedded.model.kv_dtype import KV_DTYPE, check_kv_dtype
from miles_embedded.model.load_units import load_units
from miles_embedded.model.storage import codes_of, local_shard
from miles_embedded.model.views import export, sources
from miles_embedded.quantized.activation import RoundedInputs
from miles_embedded.trainer.wider import wider_arithmetic


@contextmanager
def emulate_properties(
    model: nn.Module,
    scoring_with: Callable[..., AbstractContextManager[None]],
    emulation: Emulation,
    codec: Codec,
    snapshot: Snapshot | None = None,
) -> Iterator[None]:
    """Give the log-probabilities of a trainer's ``model`` the requested properties inside this context.

    Args:
        model: restored on exit.
        scoring_with: ``EmbeddedTrainer.scoring_with``.
        emulation: the properties.
        codec: the rollout's codec.
        snapshot: saved weights, for ``emulation.snapshot``.

    Raises:
        MilesError: there is no snapshot, ``held`` or ``through`` is not an embedded engine of this process, or the format does not
            define the rounding of activations.
    """
    with ExitStack() as stack:
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
            stack.enter_context(_rounded_inputs(model, codec))
        if emulation.kv_dtype:
            stack.enter_context(scoring_with(attached={KV_DTYPE: check_kv_dtype(emulation.kv_dtype)}))
        if emulation.through is not None:
            if emulation.emulated_products:
                stack.enter_context(emulation.through.emulated_products())
            stack.enter_context(scoring_with(_model_of(emulation.through)))
        if emulation.wider:
            stack.enter_context(wider_arithmetic(model if emulation.through is None else _model_of(emulation.through)))
        yield


def _model_of(engine: Any) -> nn.Module:
    model = getattr(engine, "model", None)
    if not isinstance(model, nn.Module):
        raise MilesError(f"{type(engine).__name__} does not run its model in the trainer's process")
    return model


@contextmanager
def _weights(model: nn.Module, units: Iterable[Encoded], codec: Codec) -> Iterator[None]:
    """Load ``units``, decoded by ``codec``, into ``model`` inside this context."""
    own = {n: local_shard(t).tensor for n, t in sources(model).items() if codes_of(t) is None}
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
    """Round the inputs of layers with quantised weights inside this context."""
    if codec.format is None:
        raise MilesError(
            "the engine's weights have no number format, so there is no rounding of activations to emulate"
        )
    inputs = RoundedInputs(model, codec)
    try:
        yield
    finally:
        inputs.remove()
