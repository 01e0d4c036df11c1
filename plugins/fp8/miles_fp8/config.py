"""The options of fp8."""

from dataclasses import dataclass

from miles_core.config import option


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """FP8 weights in 128x128 blocks."""

    skip_layers: tuple[str, ...] = option(
        (),
        flag="--fp8-skip-layers",
        help="weights to leave in bf16 on both sides: parts of parameter names (_ does not count), or globs with *",
        metavar="NAME,...",
    )
    power_of_two_scales: bool = option(
        False,
        flag="--fp8-power-of-two-scales",
        help="round block scales up to powers of two (UE8M0), as Blackwell and DeepGEMM want them",
    )
