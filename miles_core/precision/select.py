"""Choosing the number format of each side of a run, from its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from miles_core.precision.train import FakeQuantizer, install
from miles_core.sync.encode import Codec

if TYPE_CHECKING:
    from miles_core.run import Run

#: The model copy as it is: no number format.
PLAIN = "bf16"


def make_codec(run: Run) -> Codec:
    """The codec of the rollout's precision: what a weight sync sends and the engine decodes."""
    return _codec(run, run.config.rollout.precision)


def fake_quantize(run: Run, model: nn.Module) -> FakeQuantizer | None:
    """Make a model of the embedded trainer (the policy or its reference) compute in ``train.precision``; None when
    that is the plain model copy. Call it when every other hook has seen the model."""
    codec = _codec(run, run.config.train.precision)
    return None if codec.format is None else install(model, codec)


def _codec(run: Run, precision: str) -> Codec:
    if precision == PLAIN:
        return Codec()
    return Codec(run.hooks.format(precision).from_config(run.config))
