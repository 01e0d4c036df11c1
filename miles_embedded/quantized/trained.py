"""The precision of the trainer's models."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from miles_core.contracts.run import Policy, Run
from miles_core.errors import ConfigError
from miles_core.precision.products import Products
from miles_core.precision.schedule import PLAIN, precisions
from miles_core.sync.push import make_codec
from miles_embedded.quantized.weights import FakeQuantizer, install


class TrainedPrecision:
    """Applies one precision to all models of the embedded trainer (policy and reference): ``train.precision``, or plain during
    warm-up.

    With ``--quantized-product auto`` the products of all passes are emulated: the backward pass needs dequantised weights and rounded inputs
    in any case, and in small models a native forward pass in addition to them makes a step slower
    (``benchmarks/training/embedded_training.py``). With ``--quantized-dgrad`` linear layers are native in both passes, if that is available."""

    def __init__(self, run: Run, policy: Policy | None = None) -> None:
        config = run.config if policy is None else run.config_of(policy)
        self.codec = make_codec(run, policy, config.train.precision)
        products = Products.from_config(config)
        self.rounds_gradients = config.embedded.quantized_dgrad
        emulates = products.wanted == "auto" and not self.rounds_gradients
        self.products = replace(products, wanted="emulated") if emulates else products
        self.current = precisions(config, 0).train
        self._models: list[FakeQuantizer] = []

    def add(self, model: nn.Module) -> FakeQuantizer | None:
        """Fake-quantise a model, after all other hooks ran; None if the model remains plain for the whole run."""
        if self.codec.format is None:
            return None
        product = self.products.of(self.codec.format, model)
        quantizer = install(model, self.codec, product, self.rounds_gradients, self.products.wanted == "native")
        if self.rounds_gradients and not quantizer.inputs.quantizes_gradients:
            raise ConfigError(
                f"--quantized-dgrad: {self.codec.format.name} does not round the inputs of any linear layer of this model, so it cannot round "
                "their gradients either; remove the flag"
            )
        quantizer.enabled = self.current != PLAIN
        self._models.append(quantizer)
        return quantizer

    def forget(self) -> None:
        """Drop the quantised values; they are computed again when needed."""
        for quantizer in self._models:
            for source in quantizer.sources:
                quantizer.drop(source)

    def switch(self, precision: str) -> None:
        """Use ``precision`` from the next pass on: ``train.precision`` or ``bf16``. ValueError for other precisions."""
        mine = PLAIN if self.codec.format is None else self.codec.format.name
        if precision not in (PLAIN, mine):
            raise ValueError(f"this trainer supports {PLAIN} and {mine}, not {precision}")
        self.current = precision
        for quantizer in self._models:
            quantizer.enabled = precision != PLAIN


def fake_quantize(run: Run, model: nn.Module, policy: Policy | None = None) -> FakeQuantizer | None:
    """Fake-quantise one model with ``train.precision``; see ``TrainedPrecision``."""
    return TrainedPrecision(run, policy).add(model)
