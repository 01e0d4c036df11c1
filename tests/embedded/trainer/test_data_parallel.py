"""The embedded trainer on several ranks: replicated and fully sharded."""

import torch

from miles_core.testing.ranked_trainer_contract import RankedTrainerContract
from miles_embedded.model.load import load_model
from miles_embedded.trainer.build import data_parallel
from miles_embedded.trainer.optimizer import OptimizerConfig
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig


def build(strategy, checkpoint, setup, kind=EmbeddedTrainer, dtype="float32", **changes):
    config = TrainerConfig(
        optimizer=OptimizerConfig(
            lr=setup.lr, weight_decay=setup.weight_decay, betas=setup.betas, eps=setup.eps, clip_grad=setup.clip_grad
        ),
        temperature=setup.temperature,
        micro_batch_size=setup.micro_batch_size,
        max_tokens=setup.max_tokens,
        recompute=setup.recompute,
        entropy=setup.entropy,
        **changes,
    )
    parallel = data_parallel(strategy, torch.device("cpu"))
    return kind(load_model(checkpoint, dtype), config, lambda: load_model(checkpoint, dtype), None, parallel)


class TestReplicated(RankedTrainerContract):
    def make(self, checkpoint, setup):
        return build("no_shard", checkpoint, setup)


class TestFullyShard(RankedTrainerContract):
    def make(self, checkpoint, setup):
        return build("full_shard", checkpoint, setup)
