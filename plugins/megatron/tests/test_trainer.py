"""The trainer alone and among others: it does what the contract says, and two ranks compute what one computes.

Needs megatron-core; runs on a CPU with its local modules, and gloo.
"""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from miles_core.backend import Callbacks
from miles_core.testing import RankedTrainerContract, Setup, TrainerContract
from miles_core.testing.yardstick import make_batch, weighted
from miles_megatron.sizes import Sizes

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]


def make(checkpoint, setup, **sizes):
    """A float32 trainer with the contract's settings."""
    from miles_megatron import families
    from miles_megatron.trainer.build import FULL_RECOMPUTATION
    from miles_megatron.trainer.groups import start_groups
    from miles_megatron.trainer.without_cuda import adapt_modules, without_cuda

    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    s = Sizes(**{"ranks": ranks, "etp": sizes.get("tp", 1), **sizes})
    with without_cuda():
        world = start_groups(s, 0)
        adapt_modules()
        from miles_megatron.trainer.optimizer import Rates
        from miles_megatron.trainer.trainer import MegatronTrainer, Settings

        settings = Settings(
            rates=Rates(
                setup.lr,
                weight_decay=setup.weight_decay,
                betas=setup.betas,
                eps=setup.eps,
                clip_grad=setup.clip_grad,
            ),
            temperature=setup.temperature,
            micro_batch_size=setup.micro_batch_size,
            max_tokens=setup.max_tokens,
            entropy=setup.entropy,
            longest=128,
            model=FULL_RECOMPUTATION if setup.recompute else {},
        )
        a = replace(families.read(json.loads((Path(checkpoint) / "config.json").read_text())), mtp=0)
        return MegatronTrainer(a, s, world, Path(checkpoint), settings, Path(checkpoint))


class TestMegatron(TrainerContract):
    """Qwen3-MoE."""

    def make(self, checkpoint, setup):
        return make(checkpoint, setup)

    def all_layers(self, trainer):
        return [m for chunk in trainer.chunks for m in chunk.modules() if type(m).__name__ == "TransformerLayer"]


class TestTied(TestMegatron):
    family = "llama"


class TestLatent(TestMegatron):
    family = "deepseek_v3"


class TestReplicas(RankedTrainerContract):
    """Two replicas."""

    def make(self, checkpoint, setup):
        return make(checkpoint, setup)


def worked(checkpoint, **sizes):
    """What a rank computes of its share of a batch: columns before and after a step, metrics, every exported weight."""
    trainer = make(checkpoint, replace(Setup(), micro_batch_size=3, entropy=True), **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    batch = make_batch()
    mine = [
        i for i, group in enumerate(batch.group.tolist()) if group % trainer.world.replicas == trainer.world.replica
    ]
    part = batch.select(mine)
    found = {name: trainer.log_probs(part, "old", entropy=True)[name] for name in ("log_probs", "entropy")}
    norm = trainer.step(part)["train/grad_norm"][0]
    units = {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}
    found["after"], found["ref"] = (trainer.log_probs(part, kind)["log_probs"] for kind in ("old", "ref"))
    return {"samples": mine, "columns": found, "norm": norm, "units": units}


SIZES = {
    "tensor": {"tp": 2, "sequence": True},
    "pipeline": {"pp": 2},
    "virtual": {"pp": 2, "virtual": 2},
    "expert": {"ep": 2},
    "context": {"cp": 2},
    "data": {},
}


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory):
    from miles_core.testing import tiny_checkpoint

    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("ranks") / "four", num_hidden_layers=4)


@pytest.fixture(scope="module")
def alone(four_layers):
    return worked(four_layers)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_two_ranks_compute_what_one_computes(ranks, four_layers, alone, sizes):
    batch = make_batch()
    for found in ranks.run(worked_with, four_layers, sizes):
        at = torch.cat([torch.arange(int(batch.lengths[i])) + batch.starts[i] for i in found["samples"]])
        for name, column in found["columns"].items():
            torch.testing.assert_close(column, alone["columns"][name][at], rtol=0, atol=5e-5)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert found["units"].keys() == alone["units"].keys()
        for name, tensor in found["units"].items():
            torch.testing.assert_close(tensor, alone["units"][name], rtol=0, atol=1e-5)


def worked_with(checkpoint, sizes):
    return worked(checkpoint, **sizes)


def without_gradient_sync(checkpoint):
    """The same step, had nobody summed gradients over replicas."""
    from miles_megatron.trainer import trainer

    trainer.finalize_model_grads = lambda *args, **kwargs: None
    return worked(checkpoint)


def test_gradients_are_summed_over_replicas(ranks, four_layers, alone):
    """Able to fail: without ``finalize_model_grads`` every rank would step on its own samples."""
    found = ranks.run(without_gradient_sync, four_layers)
    assert all(f["norm"] != pytest.approx(alone["norm"], rel=1e-3) for f in found)


def saved(checkpoint, directory):
    trainer = make(checkpoint, Setup(), pp=2)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    trainer.step(make_batch())
    trainer.save(directory)
    trainer.step(make_batch())
    return {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}


def test_a_checkpoint_of_two_stages_goes_on_in_one(ranks, four_layers, tmp_path):
    expected = ranks.run(saved, four_layers, tmp_path)[0]
    trainer = make(four_layers, Setup())
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    trainer.load(tmp_path)
    trainer.step(make_batch())
    for unit in trainer.units():
        for name, tensor in unit.tensors.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)


def test_the_embedded_trainer_computes_the_same(alone, four_layers):
    from miles_embedded import load_model
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

    trainer = EmbeddedTrainer(load_model(four_layers, torch.float32), TrainerConfig(temperature=Setup().temperature))
    found = trainer.log_probs(make_batch(), "old", entropy=True)
    for name, column in found.items():
        torch.testing.assert_close(column, alone["columns"][name], rtol=0, atol=5e-5)
