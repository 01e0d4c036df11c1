"""The options of the plugin."""

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class Int4Config:
    """INT4 weights in groups along K."""

    group_size: int = option(
        128,
        flag="--int4-group-size",
        help="weights of a row that share a scale, for trainer, engine and checkpoint; must divide every K",
        ge=1,
        fixed=True,
    )
    scope: Literal["all", "experts"] = option(
        "all", flag="--int4-scope", help="every linear layer and expert, or routed experts only"
    )
    skip_layers: tuple[str, ...] = option(
        (),
        flag="--int4-skip-layers",
        help="weights to leave in bf16 on both sides: parts of parameter names (_ does not count), or globs with *",
        metavar="NAME,...",
    )
    fake_qat: bool = option(
        False,
        flag="--int4-fake-qat",
        help="quantisation-aware training: --rollout-int4 --train-int4 (also OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1)",
        enables=True,
    )
