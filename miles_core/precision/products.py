"""The choice between native and emulated products (``precision.product``).

The kind of product is chosen once per model from the user's options, the device and its libraries. It never depends on the number of
rows, because a token's result would then depend on the rest of the batch. Trainer and engine may use different kinds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from miles_core.errors import ConfigError
from miles_core.precision.format import Format
from miles_core.precision.product import NoProduct, Product

if TYPE_CHECKING:
    from miles_core.config.config import Config

log = logging.getLogger(__name__)

FLAG = "--quantized-product"


def emulate_product(format: Format, x: Tensor, weight: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
    """Compute the emulated product of x [M, K] and a stored weight [N, K]; return [M, N] in x's dtype."""
    return nn.functional.linear(format.fake_quantize_activation(x), format.dequantize(weight).to(x.dtype), bias)


@dataclass(frozen=True)
class Products:
    """Selects the product of the quantised layers of a backend.

    Attributes:
        wanted: ``native`` (an error if unavailable), ``emulated``, or ``auto`` (native if available).
    """

    wanted: Literal["auto", "native", "emulated"] = "emulated"

    @classmethod
    def from_config(cls, config: Config) -> Products:
        """Create from the run's options; ``--emulate-precision`` selects emulated products."""
        wanted = config.precision.quantized_product
        return cls("emulated" if wanted == "auto" and config.train.emulate_precision else wanted)

    def of(self, format: Format | None, model: nn.Module) -> Product | None:
        """Return the native product for ``model``'s layers; None for emulated products.

        Raises:
            ConfigError: ``native`` is configured but unavailable.
        """
        if format is None or self.wanted == "emulated":
            return None
        parameter = next(model.parameters())
        try:
            product = format.product(parameter.device, parameter.dtype)
        except NoProduct as why:
            if self.wanted == "native":
                raise ConfigError(
                    f"{FLAG} native: the product of {format.name} codes cannot run here, because {why}; remove the flag "
                    "or give emulated, which multiplies the dequantised codes"
                ) from None
            log.info("%s: products are emulated, because %s", format.name, why)
            return None
        log.info("%s: products of linear layers read the codes (%s), on %s", format.name, FLAG, product.device)
        return product
