"""Mamba-2 next to attention, MLPs and experts: the trainer keeps its contract, samples do not mix, and two ranks compute what one computes.

Needs megatron-core; runs on a CPU with its local modules, and gloo. ``test_exact_families`` compares with Transformers.
"""

from functools import cache
from importlib.util import find_spec

import pytest
import torch

from miles_core.trainer import Callbacks
from miles_megatron.testing import MegatronContract, collect_gradients, draw_neighbours, make, may_have_children
from miles_testing import Setup, toy_run
from miles_testing.yardstick import make_batch, weighted

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]


class TestNemotronH(MegatronContract):
    """One of mixer, MLP or experts per layer."""

    family = "nemotron_h"

    @pytest.fixture(scope="class")
    def checkpoint(self, checkpoints):
        return checkpoints(self.family)


class TestBamba(TestNemotronH):
    """A mixer and an MLP per layer."""

    family = "bamba"


@pytest.mark.parametrize("chosen", ["nemotron_h", "bamba"])
def test_a_samples_results_and_gradients_do_not_depend_on_its_neighbours(checkpoints, chosen):
    (one, first), (other, second) = (collect_gradients(checkpoints(chosen), draw_neighbours(seed)) for seed in (1, 2))
    assert not torch.equal(first[:9], second[:9]) and torch.equal(first[9:21], second[9:21])
    for name, gradient in one.items():
        assert torch.equal(gradient, other[name]), name


def test_without_the_bounds_of_samples_neighbours_change_results(checkpoints, monkeypatch):
    """Able to fail: a mixer that continues from the previous sample gives other log-probs."""
    from miles_megatron.trainer import scan

    batch = draw_neighbours(1)
    expected = make(checkpoints("bamba"), Setup()).log_probs(batch, "old")["log_probs"]
    monkeypatch.setattr(scan, "_starts", torch.zeros_like)
    found = make(checkpoints("bamba"), Setup()).log_probs(batch, "old")["log_probs"]
    assert torch.equal(found[:9], expected[:9]) and (found - expected)[9:].abs().max() > 1e-3


def work(checkpoint, sizes, directory=None):
    """Samples of a rank and their log-probs; gradient norm of a step, and every exported weight after it, and after another one. The state
    after the first step is saved to ``directory``."""
    may_have_children()
    trainer = make(checkpoint, Setup(micro_batch_size=3, recompute=True), **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    part, mine = share(trainer)
    log_probs = trainer.log_probs(part, "old")["log_probs"]
    norm = trainer.step(part)["train/grad_norm"][0]
    units = everything(trainer)
    if directory is not None:
        trainer.save(directory)
        trainer.step(part)
    return mine, log_probs, norm, units, everything(trainer)


def resume(checkpoint, sizes, directory):
    """The weights after the second step of a trainer that loads the state."""
    may_have_children()
    trainer = make(checkpoint, Setup(micro_batch_size=3, recompute=True), **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    trainer.load(directory)
    trainer.step(share(trainer)[0])
    return everything(trainer)


def share(trainer):
    batch, world = make_batch(), trainer.world
    mine = [i for i, group in enumerate(batch.group.tolist()) if group % world.replicas == world.replica]
    return batch.select(mine), mine


def everything(trainer):
    return {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}


#: Sizes of models that two ranks divide.
MODELS = {
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    },
    "nemotron_h, latent": {"layers_block_type": ["linear_attention", "moe"]},
    "nemotron_h, dense": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1]},
}
SIZES = {
    "tensor": {"tp": 2, "sequence": True},
    "tensor, whole rows": {"tp": 2},
    "pipeline": {"pp": 2},
    "virtual": {"pp": 2, "virtual": 2},
    "expert": {"ep": 2},
    "context": {"cp": 2},
    "data": {},
}
CASES = [
    ("nemotron_h", "tensor"),
    ("nemotron_h, latent", "tensor"),
    pytest.param("nemotron_h, latent", "expert", marks=pytest.mark.thorough),
    pytest.param("nemotron_h, dense", "tensor, whole rows", marks=pytest.mark.thorough),
    ("nemotron_h", "pipeline"),
    ("nemotron_h", "expert"),
    ("nemotron_h", "context"),
    ("nemotron_h", "data"),
    pytest.param("bamba", "pipeline", marks=pytest.mark.thorough),
    pytest.param("bamba", "virtual", marks=pytest.mark.thorough),
    ("bamba", "context"),  # one group of heads, which both ranks need
]


@pytest.fixture(scope="module")
def alone(make_model, tmp_path_factory):
    """family -> a model, and what one rank computes."""

    def compute(family):
        checkpoint = make_model(family, tmp_path_factory.mktemp(family) / "model", **MODELS[family])
        return checkpoint, work(checkpoint, {}, checkpoint.parent / "saved")

    return cache(compute)


@pytest.mark.parametrize(("chosen", "sizes"), CASES)
def test_two_ranks_compute_what_one_computes(ranks, alone, chosen, sizes):
    checkpoint, (_, expected, norm, units, _) = alone(chosen)
    batch = make_batch()
    for mine, log_probs, found, exported, _ in ranks.run(work, checkpoint, SIZES[sizes]):
        at = torch.cat([torch.arange(int(batch.lengths[i])) + batch.starts[i] for i in mine])
        torch.testing.assert_close(log_probs, expected[at], rtol=0, atol=2e-5)  # sums of float32 in another order
        assert found == pytest.approx(norm, rel=1e-5)
        assert exported.keys() == units.keys()
        for name, tensor in exported.items():
            torch.testing.assert_close(tensor, units[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("sizes", ["tensor", pytest.param("pipeline", marks=pytest.mark.thorough)])
def test_a_checkpoint_of_one_rank_goes_on_with_two(ranks, alone, sizes):
    checkpoint, (*_, expected) = alone("nemotron_h")
    for found in ranks.run(resume, checkpoint, SIZES[sizes], checkpoint.parent / "saved"):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5, msg=name)


#: What a run combines with such a model -> its family and options.
COMBINED = {
    "replay": ("nemotron_h", {"plugins": ["r3"], "aux_loss_coef": 0.1}),
    "a format": (
        "nemotron_h",
        {
            "plugins": ["int4", "r3"],
            **dict.fromkeys(("rollout_precision", "train_precision"), "int4"),
            "int4_group_size": 8,
            "recompute_activations": True,
        },
    ),
    "adapters": ("nemotron_h", {"plugins": ["lora"], "lora_target_modules": "all-linear,all-experts"}),
    "capacity": (
        "nemotron_h",
        {
            "plugins": ["experts"],
            "moe_capacity_factor": 0.6,
            "n_samples_per_prompt": 1,  # the embedded trainer computes a shared prompt once
            **dict.fromkeys(("rollout_batch_size", "micro_batch_size"), 6),
            "advantage_estimator": "reinforce_plus_plus",
        },
    ),
    "plain": ("bamba", {}),
}
METRICS = ("reward/mean", "train/grad_norm", "train/load_balance", "moe/dropped_fraction", "r3/tokens_differing")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "replay" else pytest.mark.thorough) for c in COMBINED]
)
def test_a_run_is_that_of_the_embedded_trainer(checkpoints, case):
    family, options = COMBINED[case]
    options = {"hf_checkpoint": checkpoints(family), "steps": 2, "dtype": "float32", "lr": 1e-3, **options}
    here, there = (toy_run(trainer=trainer, **options).metrics for trainer in ("embedded", "megatron"))
    for ours, theirs in zip(there, here, strict=True):
        names = [name for name in METRICS if name in theirs]
        assert "train/grad_norm" in names and all(name in ours for name in names)
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
        if case != "capacity":  # it drops tokens in training alone
            assert ours["mismatch/abs_log_prob_max"] < 2e-5


def test_resuming_is_bit_identical(alone):
    checkpoint, (*_, expected) = alone("nemotron_h")
    found = resume(checkpoint, {}, checkpoint.parent / "saved")
    assert found.keys() == expected.keys() and all(torch.equal(t, expected[n]) for n, t in found.items())
