"""Additional optimizers: Muon, AdamW with 8-bit state, and AdamW on the host, for miles-core."""

from miles_core.plugin import Package, Plugin, Rule, Set
from miles_optimizers.config import OptimizersConfig

__version__ = "0.1.0"


plugin = Plugin(
    name="optimizers",
    summary="--optimizer muon, adamw8bit (8-bit state) and adamw-offload (state and step on the host)",
    version=__version__,
    core="~=0.1",
    config=OptimizersConfig,
    provides={
        "optimizer": {
            "muon": "miles_optimizers.muon:make_optimizer",
            "adamw8bit": "miles_optimizers.adamw8bit:make_optimizer",
            "adamw-offload": "miles_optimizers.host:make_optimizer",
        }
    },
    packages=(
        Package(
            "torchao",
            ">=0.17",
            when="train.optimizer == adamw8bit",
            install="pip install 'torchao>=0.17'; or --optimizer adamw-offload, which needs no further package",
        ),
    ),
    requires=(
        Rule(
            "train.lr > 0",
            when="optimizers.muon_lr",
            because="the learning rate of Muon's matrices follows the schedule of --lr, multiplied by --muon-lr / --lr",
        ),
        Rule(
            "trainer != megatron",
            when="train.optimizer == adamw8bit",
            because="Megatron-Core steps with an optimizer of its own, whose state shrinks with --use-precision-aware-optimizer "
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 (and --optimizer adamw)",
        ),
        Rule(
            "trainer != megatron",
            when="train.optimizer == adamw-offload",
            because="Megatron-Core steps with an optimizer of its own, which --optimizer-cpu-offload moves to the host (and "
            "--optimizer adamw)",
        ),
        Rule(
            "trainer != megatron",
            when="train.optimizer == muon",
            because="Megatron-Core divides matrices among ranks, and Muon orthogonalizes whole ones; use --optimizer adamw, or --trainer embedded",
        ),
    ),
    sets={
        "embedded.optimizer_state_bytes": (
            Set(
                2.03,
                "train.optimizer == adamw8bit and trainer == embedded",
                "two moments of a byte and 1/64 of a byte for scales",
            ),
            Set(0.0, "train.optimizer == adamw-offload and trainer == embedded", "all of its state is in host memory"),
        )
    },
    review="miles_optimizers.review:review",
    hooks={"train.optimizer == muon": "miles_optimizers.hooks:Optimizers"},
)
