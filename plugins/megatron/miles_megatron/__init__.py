"""Megatron-Core as the trainer of miles-core: ``--trainer megatron``."""

from miles_core import Plugin
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
    review="miles_megatron.review:review",
)
