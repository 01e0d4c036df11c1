"""Megatron-Core as the trainer of miles-core: ``--trainer megatron``."""

from miles_core import Plugin, Rule
from miles_megatron.config import MegatronConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="megatron",
    summary="Megatron-Core as the trainer: tensor, pipeline, expert and context parallel",
    version=__version__,
    core="~=0.1",
    config=MegatronConfig,
    provides={"trainer": {"megatron": "miles_megatron.trainer.build:make_trainer"}},
    capabilities={"trainer": ("entropy", "sampling_support")},
    facts={"megatron.ranks": "processes that train one policy, where no runtime says it"},
    requires=(
        Rule(
            needs="train.precision == bf16",
            when="trainer == megatron",
            because="it computes in BF16 (FP32 on a CPU); a number format on the trainer's side needs --trainer embedded",
        ),
        Rule(
            needs="train.aux_loss_coef == 0",
            when="trainer == megatron",
            because="it has no load-balancing loss yet",
        ),
        Rule(
            needs="model.device != cpu or gpu.count == 0",
            when="trainer == megatron",
            because="Megatron-Core takes the GPU where there is one; CUDA_VISIBLE_DEVICES= hides it",
        ),
    ),
    review="miles_megatron.review:review",
)
