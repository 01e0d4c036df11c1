"""The options of fp8. Those that mxfp8 has too are declared alike in both: each is a distribution that works without the other, and
where both are installed, declarations of one flag that differ are refused."""

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
        help="scales come from the numbers themselves, at every use; there is no delayed scaling",
    )
    transformer_impl: Literal["local", "transformer_engine"] | None = option(
        None,
        flag="--transformer-impl",
        help="modules that the trainer computes with: local is what --trainer embedded has, transformer_engine needs "
        "--trainer megatron",
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
        help="how activations are divided by their scale, on both sides: divide; reciprocal (x * (1 / scale)) and ratio "
        "(x * (448 / amax)) as stock engine kernels do",
    )
    power_of_two_scales: bool = option(
        False,
        flag="--fp8-power-of-two-scales",
        help="round block scales up to powers of two (UE8M0), as Blackwell and DeepGEMM want them",
    )
