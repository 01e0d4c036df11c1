"""Experts in host memory: bit-equal to experts that stay on the device, and only one layer's copies at a time."""

import gc

import pytest
import torch

from miles_core.data import Sample, collate
from miles_core.train.optimizer import OptimizerConfig
from miles_core.trainer import Callbacks, Loss
from miles_embedded import load_model, routed_blocks
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_experts.offload import OffloadedExperts, offload_experts
from miles_testing import WeightsContract

OFFLOADED = {"offload_experts": True}


@pytest.mark.thorough
class TestWeights(WeightsContract):
    plugins = ("experts",)
    options = OFFLOADED


def batch_of(count=6):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 64, (9 + n,), generator=generator).tolist() for n in range(count)]
    return collate([Sample(tokens=row, response_length=5, index=n) for n, row in enumerate(rows)])


def batch_with_weights():
    batch = batch_of()
    batch.columns["loss_weight"] = torch.linspace(-1, 1, len(batch.tokens))
    return batch


def trained(checkpoint, dtype, offload, recompute=False, steps=3):
    """Weights, gradient norms and optimizer state after some steps of two micro-batches."""
    model = load_model(checkpoint, dtype)
    for (
        parameter
    ) in model.parameters():  # a CPU's products round by the alignment of their operands, which files do not respect
        parameter.data = parameter.data.clone()
    if offload:
        offload_experts(model)
    config = TrainerConfig(OptimizerConfig(lr=1e-2, clip_grad=0.5), micro_batch_size=3, recompute=recompute)
    trainer = EmbeddedTrainer(model, config)
    weigh = lambda o, m, c: Loss((o.log_probs * m.columns["loss_weight"]).sum())  # noqa: E731
    trainer.bind(Callbacks(trainer.forward, weigh, trainer.optimizer_step))
    batch = batch_with_weights()
    norms = [trainer.step(batch)["train/grad_norm"][0] for _ in range(steps)]
    return model, norms, trainer.optimizer.tensors(), trainer


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_is_bit_equal(checkpoint_of, family, dtype):
    checkpoint = checkpoint_of(family)
    for recompute in (False, True):
        here, norms, state, _ = trained(checkpoint, dtype, False, recompute)
        there, others, hosted, _ = trained(checkpoint, dtype, True, recompute)
        assert norms == others
        assert state.keys() == hosted.keys() and all(torch.equal(t, hosted[n]) for n, t in state.items())
        assert all(torch.equal(t, there.state_dict()[n]) for n, t in here.state_dict().items())


@pytest.mark.parametrize("recompute", [False, True])
def test_few_layers_have_copies_at_once(checkpoint_of, monkeypatch, recompute):
    """The copies that live after the backward pass of a layer, and between passes, are those of neighbours at most."""
    alive, most = [], 0
    copy = OffloadedExperts.copy

    def copy_and_count(self):
        nonlocal most
        before = self._values
        copy(self)
        if self._values is not before:
            alive.extend(map(torch.utils.weak.WeakTensorKeyDictionary, ({v: None} for v in self._values.values())))
        most = max(most, sum(len(each) for each in alive))

    monkeypatch.setattr(OffloadedExperts, "copy", copy_and_count)
    model, *_ = trained(checkpoint_of("qwen3_moe", num_hidden_layers=6), "float32", True, recompute, steps=1)
    gc.collect()
    assert len(routed_blocks(model)) == 6 and most <= 2 * 3, (
        "two weights of a layer, the next one and one that is being replaced"
    )
    assert not any(len(each) for each in alive)


def test_a_run_is_bit_equal_and_resumes(toy_run):
    options = {"kl_loss_coef": 0.1, "dtype": "bfloat16"}
    here, there = toy_run(**options), toy_run(["experts"], offload_experts=True, **options)
    resumed = toy_run(
        ["experts"], steps=3, load=there.directory, save=None, directory=None, offload_experts=True, **options
    )
    longer = toy_run(steps=3, **options)
    for ours, theirs in ((there, here), (resumed, longer)):
        for a, b in zip(ours.metrics[-2:], theirs.metrics[-2:], strict=True):
            for name in ("train/grad_norm", "train/loss", "train/ref_kl", "mismatch/abs_log_prob"):
                assert a.get(name) == b.get(name)


def test_stale_copies_are_not_used(checkpoint_of):
    model = load_model(checkpoint_of("qwen3_moe"), "float32")
    layer = OffloadedExperts(routed_blocks(model)[0].experts, torch.device("cpu"), None)
    before = layer.values()["down_proj"].clone()
    with torch.no_grad():
        layer.parameters["down_proj"].add_(1)
    assert torch.equal(layer.values()["down_proj"], before + 1)


def test_gradients_are_summed_in_memory_that_is_kept(checkpoint_of):
    """Memory for each micro-batch would have to be pinned, or cleared and mapped, again."""
    model, _, _, trainer = trained(checkpoint_of("qwen3_moe"), "bfloat16", True, steps=1)
    places = []
    trainer.bind(
        Callbacks(trainer.forward, trainer.callbacks.loss, lambda: places.append(hosted_gradients(trainer)) or {})
    )
    for _ in range(2):
        trainer.step(batch_with_weights())
        trainer.optimizer.zero_grad()
    assert len(places[0]) == 2 * len(routed_blocks(model)) and places[0] == places[1]
    assert all(p.grad is None for block in routed_blocks(model) for p in block.experts.parameters(recurse=False))


def hosted_gradients(trainer):
    masters = trainer.optimizer.masters.items()
    return {name: m.grad.data_ptr() for name, m in masters if ".experts." in name and m.grad is not None}
