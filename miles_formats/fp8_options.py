"""Options that the plugins of 8-bit floating-point formats share. Core accepts one flag of several plugins if its declarations are equal."""

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin.options import option


@dataclass(frozen=True, kw_only=True)
class Fp8Options:
    """Options of every 8-bit floating-point format; a plugin's own dataclass derives from it."""

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
