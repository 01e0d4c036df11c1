"""Load and memory of experts for miles-core: capacity, bias-based balancing, offloading and load statistics."""

from miles_core.plugin import Hint, Panel, Plugin, Rule, above
from miles_experts.config import ExpertsConfig

__version__ = "0.1.0"

_OWN_COPY = "a model that engine and trainer share would decode with weights that travel from host memory at every step"

plugin = Plugin(
    name="experts",
    summary="load and memory of experts: capacity, bias-based balancing, offloading, statistics",
    version=__version__,
    core="~=0.1",
    config=ExpertsConfig,
    hooks={"trainer == embedded": "miles_experts.hooks:Experts"},
    requires=(
        Rule("model.moe", because="the model has no experts; leave the flag out"),
        Rule(
            "not plugin.lora",
            when="experts.router_bias_update_rate > 0",
            because="adapters leave the base unchanged, and the correction bias is part of it",
        ),
        Rule(
            "trainer == embedded",
            when="experts.offload",
            because="Megatron-Core holds the weights and the gradients of all experts of a rank in contiguous buffers on the GPU, which gradient "
            "reduction and optimizer use whole, so a layer's experts cannot leave it; divide them among GPUs (--expert-model-parallel-size), and "
            "keep their optimizer state in host memory (--optimizer-cpu-offload)",
        ),
        Rule(
            "train.precision == bf16",
            when="experts.offload",
            because="a number format encodes weights on the device that computes with them",
        ),
        Rule(
            "train.optimizer == adamw",
            when="experts.offload",
            because="it steps one tensor after another, and AdamW"
            " is the optimizer whose result does not depend on that",
        ),
        Rule(
            "not embedded.offload_optimizer",
            when="experts.offload",
            because="both move optimizer states to host memory: --offload-optimizer those of the whole model, between steps",
        ),
        Rule(
            "not plugin.lora",
            when="experts.offload",
            because="adapters and their frozen base have a memory layout of their own",
        ),
        Rule("not plugin.zero_copy", when="experts.offload", because=_OWN_COPY),
        Rule(
            "not colocate",
            when="experts.offload",
            because="a trainer that sleeps moves its memory to the host, where the experts are already",
        ),
    ),
    recommends=(
        Rule(
            "plugin.tis",
            when="experts.capacity_factor",
            because="dropped tokens make the trainer's log-probabilities differ from the engine's, and the correction accounts for the difference",
        ),
    ),
    notes={
        "experts.capacity_factor": (
            "the trainer drops tokens of experts above their capacity (--moe-capacity-factor), and the engine drops none: their "
            "log-probabilities differ wherever a token is dropped (metrics mismatch/*). What is dropped depends on the other tokens of the "
            "micro-batch, so the gradient depends on the division into micro-batches (by 7 to 16 % of its norm in small models): keep "
            "--micro-batch-size or --max-tokens-per-gpu to reproduce a run"
        ),
        "experts.capacity_factor and plugin.r3": (
            "with r3 an expert's capacity applies to the replayed routes: the trainer uses the engine's experts, except for dropped tokens"
        ),
        "experts.offload and model.device == cpu": "--offload-experts saves nothing on a CPU, whose memory is host memory",
    },
    after=("r3",),
    review="miles_experts.review:review",
    memory="miles_experts.memory:usage",
    panels=(
        Panel(
            "moe_dropped",
            "Assignments dropped at the capacity of an expert",
            {"*moe/dropped_fraction": "*dropped"},
            section="Experts",
            percent=True,
        ),
        Panel(
            "expert_entropy",
            "Entropy of the load of experts (1 is balanced)",
            {"*train/expert_entropy": "*entropy"},
            section="Experts",
        ),
        Panel(
            "experts_unused",
            "Experts without a token in a step",
            {"*train/experts_unused": "*unused"},
            "experts",
            section="Experts",
        ),
        Panel(
            "expert_loads",
            "Load of experts relative to the mean of their layer",
            {"expert_loads*.json": ""},
            section="Experts",
            kind="grid",
        ),
    ),
    hints=(
        Hint(
            "experts-drop",
            "*moe/dropped_fraction",
            above(0.1, steps=5),
            "{metric}: experts drop {percent} of their tokens, which the engine computes",
            "raise --moe-capacity-factor, or balance the load first (--aux-loss-coef, --moe-router-bias-update-rate)",
        ),
    ),
)
