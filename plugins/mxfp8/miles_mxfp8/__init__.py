"""MXFP8 weights (OCP microscaling, blocks of 1 x 32) for miles-core."""

from miles_core.plugin import Rule, Set
from miles_formats import format_plugin
from miles_mxfp8.config import Mxfp8Config

__version__ = "0.1.0"

#: The run emulates MXFP8. The factor in ``notes`` is from benchmarks/results/grpo_step-2026-11-21-formats.json.
EMULATED = "precision.emulated and (rollout.precision == mxfp8 or train.precision == mxfp8)"

plugin = format_plugin(
    "mxfp8",
    "MXFP8 (E4M3) weights in 1x32 blocks with power-of-two scales, for the engine alone or for both sides",
    version=__version__,
    core="~=0.1",
    format="miles_mxfp8.format:Mxfp8",
    format_error={"": 0.03},
    rounds_inputs=True,
    config=Mxfp8Config,
    hardware=Rule("gpu.sm >= 100", "1x32 UE8M0 block scales are a Blackwell tensor-core format"),
    rollout_alone_recommends=(
        Rule(
            needs="plugin.r3",
            when="model.moe",
            because="with MXFP8 rollout and BF16 training the two sides route tokens to different experts",
        ),
        Rule(
            needs="plugin.tis",
            when="model.moe",
            because="with MXFP8 rollout and BF16 training sampled and trained probabilities differ",
        ),
    ),
    notes={
        EMULATED: (
            "emulated products cost time and save no memory: measured on one CPU thread, a step took 1.44 times as long as in BF16 with "
            "MXFP8 on both sides; the time on a GPU was not measured"
        ),
        f"{EMULATED} and gpu.sm >= 100 and model.device != cpu": (
            "this GPU has MXFP8 tensor cores, which the run does not use; leave --emulate-precision out to use them"
        ),
    },
    sets={
        "embedded.engine_weight_bytes": Set(
            3.03,
            "rollout.precision == mxfp8 and engine == embedded and gpu.sm >= 100 and model.dtype != float32 and not precision.emulated "
            "and precision.quantized_product != emulated",
            "native products read the codes, and the engine keeps the decoded weights",
        )
    },
    both_when="mxfp8.recipe == mxfp8",
    both_because="--fp8-recipe mxfp8 is MXFP8 on both sides",
    provides={"fp8_recipe": {"mxfp8": "miles_mxfp8.format:Mxfp8"}},
    requires=(
        Rule(
            needs="mxfp8.dynamic_scaling",
            because="with scales from earlier batches (delayed scaling), a token's results would depend on earlier computations, and "
            "engine and trainer would disagree: leave --no-fp8-dynamic-scaling out",
        ),
        Rule(
            needs="trainer == megatron",
            when="mxfp8.transformer_impl == transformer_engine",
            because="only the Megatron trainer uses TransformerEngine's modules; the embedded trainer has its own "
            "(--transformer-impl local)",
        ),
        Rule(
            needs="rollout.precision == mxfp8",
            when="train.precision == mxfp8",
            because="MXFP8 training is only exact against MXFP8 rollout",
        ),
    ),
)
