"""The precision of the trainer's models."""

from __future__ import annotations

from torch import nn

from miles_core.contracts.run import Policy, Run
from miles_core.errors import ConfigError
from miles_core.precision.product import Product
from miles_core.precision.products import Products
from miles_core.precision.schedule import PLAIN, precisions
from miles_core.sync.push import make_codec
from miles_embedded.model.experts import routed_blocks
from miles_embedded.model.storage import codes_of
from miles_embedded.quantized.weights import FakeQuantizer, install


class TrainedPrecision:
    """Applies one precision to all models of the embedded trainer (policy and reference): ``train.precision``, or plain during
    warm-up.

    With ``--quantized-product auto`` linear layers are native, if that is available, where it makes a step faster
    (``benchmarks/training/embedded_training.py``): in dense models, and with quantised gradients in all. Experts are emulated, because their
    native kernel is made for the few rows of a decode step. Models of several ranks, where sharded weights are quantised at every use, and models
    that are stored as codes are emulated, too.

    Args:
        ranks: number of data-parallel ranks."""

    def __init__(self, run: Run, policy: Policy | None = None, ranks: int = 1) -> None:
        config = run.config if policy is None else run.config_of(policy)
        self.codec = make_codec(run, policy, config.train.precision)
        self.products, self._ranks = Products.from_config(config), ranks
        self.rounds_gradients = config.embedded.quantized_dgrad
        self.current = precisions(config, 0).train
        self._models: list[FakeQuantizer] = []

    def add(self, model: nn.Module) -> FakeQuantizer | None:
        """Fake-quantise a model, after all other hooks ran; None if the model remains plain for the whole run."""
        if self.codec.format is None:
            return None
        native_experts = self.products.wanted == "native"
        quantizer = install(model, self.codec, self.product_of(model), self.rounds_gradients, native_experts)
        if self.rounds_gradients and not quantizer.inputs.quantizes_gradients:
            raise ConfigError(
                f"--quantized-dgrad: {self.codec.format.name} does not round the inputs of any linear layer of this model, so it cannot round "
                "their gradients either; remove the flag"
            )
        quantizer.enabled = self.current != PLAIN
        self._models.append(quantizer)
        return quantizer

    def product_of(self, model: nn.Module) -> Product | None:
        """Return the native product of the linear layers of ``model``; None if they are emulated."""
        if self.products.wanted == "auto":
            stored = any(codes_of(parameter) is not None for parameter in model.parameters())
            if self._ranks > 1 or stored or (routed_blocks(model) and not self.rounds_gradients):
                return None
        return self.products.of(self.codec.format, model)

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
