"""The matrix product of a quantised layer: by tensor cores that read codes, or emulated.

Emulated, a product dequantises both operands to the model's dtype and multiplies them there: any device can, and two
sides on one machine then call the same function with the same numbers. Tensor cores of some GPUs read the codes
themselves and apply each block's scale to its partial sum, which is faster and rounds less: the operands are not
rounded to BF16 once more after dequantisation. The codes are the same bytes either way; the result is not, so a format
declares how far its native product may be from the emulated one, and every run measures that before its first step
(``mismatch.product_probe``).

Which of the two runs is decided once for a model, by what the user asked for, the device and its libraries; never by
the number of rows, because then a token's result would depend on who else is in the batch. Engine and trainer of a
unified run decide alike.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from miles_core.errors import ConfigError

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.precision.format import Format, Parts

log = logging.getLogger(__name__)

FLAG = "--quantized-product"


class NoProduct(Exception):
    """A format has no native product for this device or dtype. The message says why and continues ``because``."""


class Product(ABC):
    """One format's native product on one device.

    Attributes:
        device, dtype: of what it multiplies; the result has the dtype too.
        eps: bound of its distance from the emulated product: the root mean square of the differences over that of the
            values.
    """

    eps: float

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def takes(self, shape: tuple[int, int]) -> bool:
        """Whether a weight [N, K] can be multiplied so; one that cannot is emulated."""
        return True

    @abstractmethod
    def prepare(self, parts: Mapping[str, Tensor]) -> Parts:
        """A stored weight (``Format.storage``) -> the same codes and scales as the tensor cores want them laid out, views
        or copies; what is kept of them has the same strides."""

    @abstractmethod
    def __call__(self, x: Tensor, weight: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        """x [M, K] in ``dtype``, M >= 1, times a prepared weight [N, K] -> [M, N].

        ``x`` is quantised here, to the codes that ``Format.fake_quantize_activation`` dequantises; a row of it never
        depends on the others. ``bias`` is [N] in ``dtype``."""


def emulated(format: Format, x: Tensor, weight: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
    """The product of x [M, K] and a stored weight [N, K] without tensor cores that read codes -> [M, N] in x's dtype."""
    return nn.functional.linear(format.fake_quantize_activation(x), format.dequantize(weight).to(x.dtype), bias)


@dataclass(frozen=True)
class Products:
    """Which product the quantised layers of a backend use.

    Attributes:
        wanted: ``native`` or a refusal, ``emulated``, or ``auto``: native where it can be had.
    """

    wanted: Literal["auto", "native", "emulated"] = "emulated"

    @classmethod
    def from_config(cls, config: Config) -> Products:
        """As the run's options ask: ``--emulate-precision`` means without a format's tensor cores."""
        wanted = config.precision.quantized_product
        return cls("emulated" if wanted == "auto" and config.train.emulate_precision else wanted)

    def of(self, format: Format | None, model: nn.Module) -> Product | None:
        """The native product for ``model``'s layers; None where they are emulated.

        Raises:
            ConfigError: ``native`` is wanted and cannot be had.
        """
        if format is None or self.wanted == "emulated":
            return None
        parameter = next(model.parameters())
        try:
            product = format.product(parameter.device, parameter.dtype)
        except NoProduct as why:
            if self.wanted == "native":
                raise ConfigError(
                    f"{FLAG} native: the product of {format.name} codes cannot run here, because {why}; leave the flag "
                    "away or give emulated, which multiplies the dequantised codes"
                ) from None
            log.info("%s: products are emulated, because %s", format.name, why)
            return None
        log.info("%s: products of linear layers read the codes (%s), on %s", format.name, FLAG, product.device)
        return product
