"""What a trainer saves, and loads."""

import pytest
import torch

from miles_core.contracts.trainer import Callbacks
from miles_core.errors import CheckpointError
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.export import export_checkpoint
from miles_embedded.model.load import load_model
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing import tiny_checkpoint
from miles_testing.yardstick import make_batch, weighted


def test_layers_that_share_a_router_are_saved_loaded_and_exported(tmp_path):
    """The sharing is declared nowhere: the checkpoint holds the router twice, and two layers have one parameter."""
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "model")

    def make():
        model = load_model(checkpoint, "float32")
        model.model.layers[1].mlp.gate = model.model.layers[0].mlp.gate
        trainer = EmbeddedTrainer(model, TrainerConfig(OptimizerConfig(lr=1e-2)))
        trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
        return trainer

    trainer = make()
    before = trainer.model.model.layers[0].mlp.gate.weight.detach().clone()
    trainer.step(make_batch())
    trainer.save(tmp_path / "saved")
    other = make()
    other.load(tmp_path / "saved")
    router = other.model.model.layers[1].mlp.gate.weight
    assert torch.equal(router, trainer.model.model.layers[0].mlp.gate.weight) and not torch.equal(router, before)
    export_checkpoint(trainer.model, None, tmp_path / "export")
    again = load_model(tmp_path / "export", "float32")
    for layer in again.model.layers:
        assert torch.equal(layer.mlp.gate.weight, router)


def test_a_checkpoint_of_a_run_with_another_dtype_is_explained(tmp_path):
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "model")
    config = TrainerConfig(OptimizerConfig(lr=1e-2))
    EmbeddedTrainer(load_model(checkpoint, "float32"), config).save(tmp_path / "saved")
    trainer = EmbeddedTrainer(load_model(checkpoint, "bfloat16"), config)
    with pytest.raises(
        CheckpointError, match=r"optimizer has no tensor 'master\.\S+'; the saved run had another model, --dtype or"
    ):
        trainer.load(tmp_path / "saved")
