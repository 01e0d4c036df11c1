"""The contract of trainers on ranks notices those that break it."""

import pytest
import torch

from miles_core.contracts.trainer import Callbacks
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.load import load_model
from miles_embedded.trainer.build import data_parallel
from miles_embedded.trainer.data_parallel import Replicated
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.ranked_trainer_contract import SHARES, RankedTrainerContract
from miles_testing.tiny import tiny_checkpoint
from miles_testing.yardstick import weighted


class Averaging(Replicated):
    """Averages gradients over ranks, as most trainers do."""

    def sum_gradients(self, masters):
        masters = list(masters)
        super().sum_gradients(masters)
        for master in masters:
            if master.grad is not None:
                master.grad /= self.world.size


class Forgetful(Replicated):
    """Steps each rank on its own gradients, and nothing fails."""

    def sum_gradients(self, masters):
        pass


class Local(Replicated):
    """Takes this rank's statistics for the whole step's."""

    def sum(self, value):
        return value


class Broken(RankedTrainerContract):
    def make(self, checkpoint, setup):
        config = TrainerConfig(
            OptimizerConfig(lr=setup.lr, weight_decay=setup.weight_decay, eps=setup.eps, clip_grad=setup.clip_grad),
            setup.temperature,
            setup.micro_batch_size,
        )
        parallel = data_parallel("no_shard", torch.device("cpu"))
        if parallel.world.size > 1:
            parallel.__class__ = self.parallel
        model = load_model(checkpoint, "float32")
        trainer = EmbeddedTrainer(model, config, lambda: load_model(checkpoint, "float32"), None, parallel)
        trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
        return trainer


class BrokenByAveraging(Broken):
    parallel = Averaging


class BrokenByForgetting(Broken):
    parallel = Forgetful


class BrokenByItsOwnStatistics(Broken):
    parallel = Local


@pytest.mark.parametrize("suite", [BrokenByAveraging, BrokenByForgetting, BrokenByItsOwnStatistics])
def test_a_broken_trainer_is_noticed(ranks, suite, tmp_path):
    checkpoint = tiny_checkpoint("llama", tmp_path / "checkpoint")
    with pytest.raises(AssertionError):
        suite().test_ranks_compute_what_one_process_computes(ranks, checkpoint, SHARES["unequal"])
