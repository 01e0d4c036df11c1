"""The options of the plugin.

Options that mxfp8 has too must have identical declarations in both plugins: each plugin works without the other, and core rejects
different declarations of one flag if both are installed."""

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """FP8 weights in 128x128 blocks."""

    recipe: str | None = option(
        None,
        flag="--fp8-recipe",
        help="quantise engine and trainer alike: blockwise is --rollout-fp8 --train-fp8, mxfp8 is --rollout-mxfp8 "
        "--train-mxfp8",
        choices=("*",),
        part="fp8_recipe",
    )
    format: Literal["e4m3"] = option(
        "e4m3", flag="--fp8-format", help="element type; e4m3 in the forward pass, the backward pass stays in full"
    )
    dynamic_scaling: bool = option(
        True,
        flag="--fp8-dynamic-scaling",
        help="compute scales from the current values at every use; delayed scaling is not supported",
    )
    transformer_impl: Literal["local", "transformer_engine"] | None = option(
        None,
        flag="--transformer-impl",
        help="the trainer's module implementation: local for --trainer embedded; transformer_engine needs --trainer megatron",
    )
    skip_layers: tuple[str, ...] = option(
        (),
        flag="--fp8-skip-layers",
        help="weights to leave in bf16 on both sides: parts of parameter names (_ does not count), or globs with *",
        metavar="NAME,...",
    )
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
