"""NVFP4 expert weights for miles-core (experimental)."""

from miles_core.plugin import Rule
from miles_formats import format_plugin
from miles_nvfp4.config import Nvfp4Config

__version__ = "0.1.0"

#: The run emulates NVFP4. The factor in ``notes`` is from benchmarks/results/grpo_step-2026-11-21-formats.json.
EMULATED = "precision.emulated and rollout.precision == nvfp4"

plugin = format_plugin(
    "nvfp4",
    "NVFP4 (E2M1 in blocks of 16, two levels of scales) expert weights on both sides; experimental",
    version=__version__,
    core="~=0.1",
    format="miles_nvfp4.format:Nvfp4",
    format_error={"": 0.1},
    rounds_inputs=True,
    config=Nvfp4Config,
    hardware=Rule("gpu.sm >= 100", "E2M1 GEMMs need Blackwell or later"),
    model=Rule(
        "model.moe",
        "NVFP4 quantises expert matrices only, and a dense model has none; use bf16 (as train_precision and rollout_precision of a dense teacher)",
    ),
    rollout_alone=False,
    experimental=True,
    notes={
        EMULATED: (
            "emulated products cost time and save no memory: measured on one CPU thread, a step took 1.35 times as long as in BF16; the "
            "time on a GPU was not measured"
        ),
    },
    both_when="nvfp4.recipe == nvfp4",
    both_because="--fp4-recipe nvfp4 is NVFP4 on both sides",
)
