"""INT4 weights in groups along K, with quantisation-aware training, for miles-core."""

from miles_core.plugin import Hint, Rule, above
from miles_formats import format_plugin
from miles_int4.config import Int4Config

__version__ = "0.1.0"

plugin = format_plugin(
    "int4",
    "INT4 weights in groups along K, with quantisation-aware training",
    version=__version__,
    core="~=0.1",
    format="miles_int4.format:Int4",
    format_error={"int4.group_size <= 256": 0.13, "": 0.2},
    config=Int4Config,
    rollout_alone_recommends=(
        Rule(
            needs="train.precision == int4",
            because="without quantisation-aware training the trainer does not compute with the INT4 weights of the engine, which "
            "increases the log-prob gap: add --train-int4",
        ),
        Rule(
            needs="plugin.r3",
            when="model.moe",
            because="with INT4 rollout and BF16 training the two sides route tokens to different experts",
        ),
        Rule(
            needs="plugin.tis",
            because="with INT4 rollout and BF16 training sampled and trained probabilities differ",
        ),
    ),
    both_when="int4.fake_qat",
    both_because="quantisation-aware training is INT4 on both sides",
    requires=(
        Rule(
            needs="model.moe",
            when="int4.scope == experts",
            because="--int4-scope experts quantises routed experts, and a dense model has none",
        ),
    ),
    environment={
        "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "int4.fake_qat",
        "OPEN_TRAINING_INT4_GROUP_SIZE": "int4.group_size",
    },
    hints=(
        Hint(
            "int4-mismatch",
            "mismatch/kl_k3",
            above(2e-3),
            "INT4 weights in the engine differ from the trained weights by a KL of {value} per token",
            "train with the same rounding (--train-precision int4), use a smaller group (--int4-group-size 32), leave sensitive "
            "layers in bfloat16 (--int4-skip-layers), start from a model that was warmed up in bfloat16, and use a higher --lr than "
            "in bfloat16",
            when="rollout.precision == int4",
        ),
    ),
    toy={"int4_group_size": 32},
)
