"""The options of the plugin."""

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin import option
from miles_formats import Fp8Options


@dataclass(frozen=True, kw_only=True)
class Fp8Config(Fp8Options):
    """FP8 weights in 128x128 blocks."""

    activation_form: Literal["divide", "reciprocal", "ratio"] = option(
        "divide",
        flag="--fp8-activation-form",
        help="how engine and trainer apply the scale to activations: divide (x / scale); reciprocal (x * (1 / scale)) or ratio "
        "(x * (448 / amax)), as in stock engine kernels",
    )
    power_of_two_scales: bool = option(
        False,
        flag="--fp8-power-of-two-scales",
        help="round block scales up to powers of two (UE8M0), as Blackwell and DeepGEMM require",
    )
    fixed_order: bool = option(
        False,
        flag="--fp8-fixed-order",
        help="native products use one kernel and tile for any number of rows, so that a row's result does not depend on its batch",
    )
