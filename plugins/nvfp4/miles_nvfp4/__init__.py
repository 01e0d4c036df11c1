"""NVFP4 expert weights for miles-core (experimental)."""

from miles_core.plugin.manifest import Pair, Plugin, Rule, Set
from miles_nvfp4.config import Nvfp4Config

__version__ = "0.1.0"

_TENSOR_CORES = Rule(
    needs="gpu.sm >= 100",
    because="E2M1 products exist from Blackwell on",
    hardware=True,
)
_RECIPE = Set("nvfp4", when="nvfp4.recipe == nvfp4", because="--fp4-recipe nvfp4 is NVFP4 on both sides")

plugin = Plugin(
    name="nvfp4",
    summary="NVFP4 (E2M1 in blocks of 16, two levels of scales) expert weights on both sides; experimental",
    version=__version__,
    core="~=0.1",
    config=Nvfp4Config,
    formats={"nvfp4": "miles_nvfp4.format:Nvfp4"},
    sets={"rollout.precision": _RECIPE, "train.precision": _RECIPE},
    requires=(
        Rule(
            needs="model.moe",
            when="rollout.precision == nvfp4",
            because="NVFP4 is for the matrices of experts, and a dense model has none",
        ),
    ),
    claims={"precision": "a run has one low-precision format"},
    pairs=(Pair("nvfp4", "nvfp4", rules=(_TENSOR_CORES,), experimental=True),),
    aliases={
        "--rollout-nvfp4": {"rollout.precision": "nvfp4"},
        "--train-nvfp4": {"train.precision": "nvfp4"},
    },
)
