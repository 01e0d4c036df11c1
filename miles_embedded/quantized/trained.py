"""The models of the trainer in the precision they train in."""

from __future__ import annotations

from torch import nn

from miles_core.contracts.policy import Policy
from miles_core.contracts.run import Run
from miles_core.precision.product import Products
from miles_core.precision.schedule import PLAIN, precisions
from miles_core.sync.precision import make_codec
from miles_embedded.quantized.weights import FakeQuantizer, install


class TrainedPrecision:
    """The models of the embedded trainer (the policy and its reference): all compute in ``train.precision``, or plainly
    during the warm-up."""

    def __init__(self, run: Run, policy: Policy | None = None) -> None:
        config = run.config if policy is None else run.config_of(policy)
        self.codec = make_codec(run, policy, config.train.precision)
        self.products = Products.from_config(config)
        self.current = precisions(config, 0).train
        self._models: list[FakeQuantizer] = []

    def add(self, model: nn.Module) -> FakeQuantizer | None:
        """Take a model in, when every other hook has seen it; None when it stays as it is for the whole run."""
        if self.codec.format is None:
            return None
        quantizer = install(model, self.codec, self.products.of(self.codec.format, model))
        quantizer.enabled = self.current != PLAIN
        self._models.append(quantizer)
        return quantizer

    def forget(self) -> None:
        """Give up what was quantised; it is made again when it is needed."""
        for quantizer in self._models:
            for source in quantizer.sources:
                quantizer.drop(source)

    def switch(self, precision: str) -> None:
        """From the next pass on compute in ``precision``: ``train.precision`` or ``bf16``."""
        mine = PLAIN if self.codec.format is None else self.codec.format.name
        if precision not in (PLAIN, mine):
            raise ValueError(f"this trainer was built for {mine}, not for {precision}")
        self.current = precision
        for quantizer in self._models:
            quantizer.enabled = precision != PLAIN


def fake_quantize(run: Run, model: nn.Module, policy: Policy | None = None) -> FakeQuantizer | None:
    """One model of a trainer in ``train.precision``; see ``TrainedPrecision``."""
    return TrainedPrecision(run, policy).add(model)
