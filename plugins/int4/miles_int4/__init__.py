"""INT4 weights in groups along K, with quantisation-aware training, for miles-core."""

from miles_core.plugin.manifest import Pair, Plugin, Rule, Set
from miles_int4.config import Int4Config

__version__ = "0.1.0"

_MISMATCH = (
    Rule(
        needs="train.precision == int4",
        because="without quantisation-aware training an INT4 engine samples from weights that the trainer never sees, "
        "which raises the log-prob gap: add --train-int4",
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
)
_QAT = Set("int4", when="int4.fake_qat", because="quantisation-aware training is INT4 on both sides")

plugin = Plugin(
    name="int4",
    summary="INT4 weights in groups along K, with quantisation-aware training",
    version=__version__,
    core="~=0.1",
    config=Int4Config,
    formats={"int4": "miles_int4.format:Int4"},
    sets={"rollout.precision": _QAT, "train.precision": _QAT},
    requires=(
        Rule(
            needs="model.moe",
            when="int4.scope == experts",
            because="--int4-scope experts quantises routed experts, and a dense model has none",
        ),
    ),
    claims={"precision": "a run has one low-precision format"},
    pairs=(
        Pair("int4", "bf16", recommends=_MISMATCH),
        Pair("int4", "int4"),
    ),
    aliases={
        "--rollout-int4": {"rollout.precision": "int4"},
        "--train-int4": {"train.precision": "int4"},
    },
    environment={
        "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "int4.fake_qat",
        "OPEN_TRAINING_INT4_GROUP_SIZE": "int4.group_size",
    },
)
