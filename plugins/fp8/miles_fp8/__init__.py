"""FP8 weights in blocks of 128 x 128 (DeepSeek-V3 style) for miles-core."""

from miles_core.plugin import Rule, Set
from miles_formats import format_plugin
from miles_fp8.config import Fp8Config

__version__ = "0.1.0"

#: The run emulates FP8. The factors in ``notes`` are from benchmarks/results: embedded_training-2026-11-27-{dense,moe}-fp8_emulated-36000
#: (GPU) and grpo_step-2026-11-21-formats (CPU).
EMULATED = "precision.emulated and (rollout.precision == fp8 or train.precision == fp8)"
#: Where ``--quantized-product auto`` is native (``product.Fp8Product``).
_HOPPER = "gpu.sm >= 90 and gpu.sm < 100 and model.dtype != float32 and not precision.emulated and fp8.activation_form == divide"
_NATIVE = f"{_HOPPER} and precision.quantized_product != emulated"

plugin = format_plugin(
    "fp8",
    "FP8 (E4M3) weights in 128x128 blocks, for the engine alone or for engine and trainer",
    version=__version__,
    core="~=0.1",
    format="miles_fp8.format:Fp8",
    format_error={"": 0.03},
    rounds_inputs=True,
    config=Fp8Config,
    hardware=Rule("gpu.sm >= 90", "block-wise FP8 GEMMs need the FP8 tensor cores of Hopper or later"),
    rollout_alone_recommends=(
        Rule(
            needs="plugin.r3",
            when="model.moe",
            because="with FP8 rollout and BF16 training the two sides route tokens to different experts",
        ),
        Rule(
            needs="plugin.tis",
            when="model.moe",
            because="with FP8 rollout and BF16 training sampled and trained probabilities differ",
        ),
    ),
    notes={
        f"{EMULATED} and gpu != none and model.device != cpu": (
            "emulated products cost time and save no memory: measured on H200, training took 1.02 times as long as in "
            "BF16 (dense, layers of Qwen3-8B's shape) and 1.07 times (small mixture of experts); rollouts take longer, too"
        ),
        f"{EMULATED} and gpu.sm >= 90 and model.device != cpu": (
            "this GPU has FP8 tensor cores, which the run does not use; leave --emulate-precision out to use them"
        ),
        f"{EMULATED} and (gpu == none or model.device == cpu)": (
            "emulated products cost time and save no memory: measured on one CPU thread, a step took 1.23 times as long as in BF16 with FP8 "
            "in the engine, and 1.36 times with FP8 on both sides"
        ),
    },
    sets={
        "precision.quantized_product": Set(
            "native",
            f"fp8.fixed_order and {_HOPPER}",
            "it makes engine and trainer compute equal products, which are native on both sides",
        ),
        "embedded.engine_weight_bytes": Set(
            1.0,
            f"rollout.precision == fp8 and engine == embedded and {_NATIVE}",
            "native products read the codes, and the engine drops the decoded weights",
        ),
    },
    both_when="fp8.recipe == blockwise",
    both_because="--fp8-recipe blockwise is block-wise FP8 on both sides",
    provides={"fp8_recipe": {"blockwise": "miles_fp8.format:Fp8"}},
    requires=(
        Rule(
            needs="fp8.activation_form == divide",
            when="fp8.power_of_two_scales",
            because="with power-of-two scales all forms give the same codes, so the option would have no effect",
        ),
        Rule(
            needs="not precision.emulated",
            when="fp8.fixed_order",
            because="it chooses the kernel of native products, so the option would have no effect on emulated ones",
        ),
        Rule(
            needs="fp8.dynamic_scaling",
            because="with scales from earlier batches (delayed scaling), a token's results would depend on earlier computations, and "
            "engine and trainer would disagree: leave --no-fp8-dynamic-scaling out",
        ),
        Rule(
            needs="trainer == megatron",
            when="fp8.transformer_impl == transformer_engine",
            because="only the Megatron trainer uses TransformerEngine's modules; the embedded trainer has its own "
            "(--transformer-impl local)",
        ),
    ),
)
