"""Gated delta nets: the trainer computes what Transformers computes, sample by sample, whatever the parallel sizes.

Needs megatron-core; runs on a CPU with its local modules, and gloo.
"""

import itertools
from functools import cache
from importlib.util import find_spec

import pytest
import torch

from miles_core.trainer import Callbacks
from miles_megatron.testing import MegatronContract, collect_gradients, draw_neighbours, make, may_have_children
from miles_testing import Setup, toy_run
from miles_testing.yardstick import checkpoint_weights, make_batch, weighted, yardstick, yardstick_model

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]


class TestQwen3Next(MegatronContract):
    """Joined projections, experts."""

    family = "qwen3_next"

    @pytest.fixture(scope="class")
    def checkpoint(self, checkpoints):
        return checkpoints(self.family)


@pytest.mark.thorough
class TestQwen35(TestQwen3Next):
    """Separate projections, dense."""

    family = "qwen3_5_text"


#: Differences of log-probs from those of another order of sums in float32, and of gradients relative to their norm. The largest ones
#: found are 1.3e-5 and 1.4e-5; those of Transformers in float32 from itself in float64 are 1.6e-5 and 1.7e-5.
CLOSE = 2e-5


@pytest.mark.parametrize("hybrid", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_log_probs_gradients_and_exports_are_those_of_transformers(checkpoints, hybrid):
    from safetensors.torch import load_file

    checkpoint, batch = checkpoints(hybrid), make_batch()
    found, columns = collect_gradients(checkpoint, batch)
    model = yardstick_model(checkpoint)
    log_probs, _ = yardstick(model, batch, Setup().temperature)
    torch.testing.assert_close(columns.double(), log_probs.detach(), rtol=0, atol=CLOSE)
    (log_probs * batch.column("weight")).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    expected = checkpoint_weights(model, checkpoint)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= CLOSE * expected[name].norm(), name
    trainer, stored = make(checkpoint, Setup()), load_file(checkpoint / "model.safetensors")
    units = {name: tensor for unit in trainer.units() for name, tensor in unit.tensors.items()}
    assert units.keys() == stored.keys() and all(torch.equal(units[name], stored[name]) for name in stored)


@pytest.mark.parametrize("hybrid", ["qwen3_next", "qwen3_5_text"])
def test_a_samples_results_and_gradients_do_not_depend_on_its_neighbours(checkpoints, hybrid):
    (one, first), (other, second) = (collect_gradients(checkpoints(hybrid), draw_neighbours(seed)) for seed in (1, 2))
    assert not torch.equal(first[:9], second[:9]) and torch.equal(first[9:21], second[9:21])
    for name, gradient in one.items():
        assert torch.equal(gradient, other[name]), name


def test_without_the_samples_starts_neighbours_change_results(checkpoints, monkeypatch):
    """Able to fail: states that continue from the previous sample would change log-probs."""
    from megatron.core.ssm.gated_delta_net import gdn

    from miles_megatron.trainer import delta, delta_rule

    batch = draw_neighbours(1)
    expected = make(checkpoints("qwen3_next"), Setup()).log_probs(batch, "old")["log_probs"]
    delta._replace_kernels()
    joined = torch.tensor([0, len(batch.tokens)])
    for name, kernel in (("causal_conv1d", delta_rule.convolve), ("chunk_gated_delta_rule", delta_rule.delta_rule)):
        with monkeypatch.context() as patch:
            patch.setattr(
                gdn, name, lambda *args, kernel=kernel, **given: kernel(*args, **{**given, "cu_seqlens": joined})
            )
            found = make(checkpoints("qwen3_next"), Setup()).log_probs(batch, "old")["log_probs"]
        assert (found - expected)[9:].abs().max() > 1e-3, name


def work(checkpoint, sizes):
    """Samples of a rank and their log-probs; gradient norm of a step, and every exported weight after it."""
    setup = Setup(micro_batch_size=3, recompute=True)
    trainer = make(checkpoint, setup, **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    batch, world = make_batch(), trainer.world
    mine = [i for i, group in enumerate(batch.group.tolist()) if group % world.replicas == world.replica]
    part = batch.select(mine)
    log_probs = trainer.log_probs(part, "old")["log_probs"]
    norm = trainer.step(part)["train/grad_norm"][0]
    units = {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}
    return mine, log_probs, norm, units


SIZES = {
    "tensor": {"tp": 2, "sequence": True},
    "pipeline": {"pp": 2},
    "expert": {"ep": 2},
    "context": {"cp": 2},
    "data": {},
}
CASES = [
    pytest.param(hybrid, sizes, id=f"{hybrid}-{name}", marks=() if hybrid == "qwen3_next" else pytest.mark.thorough)
    for hybrid, (name, sizes) in itertools.product(("qwen3_next", "qwen3_5_text"), SIZES.items())
    if not (hybrid == "qwen3_5_text" and name == "expert")
]


@pytest.fixture(scope="module")
def four_layers(make_model, tmp_path_factory):
    """hybrid -> a model whose stages have delta nets and attention, and what one rank computes."""
    kinds = ["linear_attention", "full_attention"] * 2

    def build(hybrid):
        directory = tmp_path_factory.mktemp(hybrid) / "model"
        checkpoint = make_model(hybrid, directory, num_hidden_layers=4, layer_types=kinds)
        return checkpoint, work(checkpoint, {})

    return cache(build)


@pytest.mark.parametrize(("hybrid", "sizes"), CASES)
def test_two_ranks_compute_what_one_computes(ranks, four_layers, hybrid, sizes):
    checkpoint, (_, expected, norm, units) = four_layers(hybrid)
    batch = make_batch()
    for mine, log_probs, found, exported in ranks.run(work, checkpoint, sizes):
        at = torch.cat([torch.arange(int(batch.lengths[i])) + batch.starts[i] for i in mine])
        torch.testing.assert_close(log_probs, expected[at], rtol=0, atol=CLOSE)
        assert found == pytest.approx(norm, rel=1e-5)
        assert exported.keys() == units.keys()
        for name, tensor in exported.items():
            torch.testing.assert_close(tensor, units[name], rtol=0, atol=1e-6, msg=name)


def step_and_save(checkpoint, directory, sizes, load):
    """Exported weights after two steps; the state after the first one is saved, or loaded from another run."""
    may_have_children()
    trainer = make(checkpoint, Setup(), **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    batch, world = make_batch(), trainer.world
    part = batch.select([i for i, group in enumerate(batch.group.tolist()) if group % world.replicas == world.replica])
    if load:
        trainer.load(directory)
    else:
        trainer.step(part)
        trainer.save(directory)
    trainer.step(part)
    return {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [("tensor", None), pytest.param(None, "tensor", marks=pytest.mark.thorough), ("context", "pipeline")],
)
def test_a_checkpoint_continues_with_other_sizes(ranks, four_layers, tmp_path, before, after):
    checkpoint, _ = four_layers("qwen3_next")

    def run(name, load):
        if name is None:
            return step_and_save(checkpoint, tmp_path, {}, load)
        return ranks.run(step_and_save, checkpoint, tmp_path, SIZES[name], load)[0]

    expected, found = run(before, False), run(after, True)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("hybrid", "precision"),
    [("qwen3_next", "int4"), pytest.param("qwen3_5_text", "mxfp8", marks=pytest.mark.thorough)],
)
def test_a_number_format_computes_what_the_embedded_trainer_computes_in_it(make_model, tmp_path, hybrid, precision):
    sizes = {"intermediate_size": 64} if hybrid == "qwen3_5_text" else {}
    checkpoint = make_model(hybrid, tmp_path / "model", **sizes)
    options = {"rollout_precision": precision, "train_precision": precision, "emulate_precision": True, "steps": 1}
    options |= {"int4_group_size": 16} if precision == "int4" else {}
    here, there = (
        toy_run([], trainer=trainer, hf_checkpoint=checkpoint, dtype="float32", **options).metrics[0]
        for trainer in ("embedded", "megatron")
    )
    assert there["reward/mean"] == here["reward/mean"] and there["mismatch/abs_log_prob"] < 1e-3
    assert there["train/grad_norm"] == pytest.approx(here["train/grad_norm"], rel=1e-3)
