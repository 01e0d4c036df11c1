"""Choosing the number format of each side of a run, from its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from miles_core.precision.train import FakeQuantizer, install
from miles_core.sync.encode import Codec

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.precision.format import Format
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
    return codec_for(run.hooks.format(precision), run.config)


def codec_for(format: type[Format], config: Config) -> Codec:
    """The codec of a number format with the options of ``config``: one rule for runs and for ``miles convert``."""
    return Codec(format.from_config(config))
