"""A trainer that sleeps holds no memory, and wakes with the same bits. Needs megatron-core; runs on a CPU."""

from importlib.util import find_spec

import pytest
import torch

from miles_core.trainer import Callbacks, MtpRequest
from miles_megatron.testing import make, may_have_children
from miles_testing import Setup, tiny_checkpoint, toy_run
from miles_testing.yardstick import make_batch, weighted

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("sleeping") / "model")


def stepped(checkpoint, **how):
    """A trainer after one step."""
    trainer = make(checkpoint, Setup(), **how)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    trainer.step(make_batch())
    return trainer


def held(trainer, part):
    """Tensors of a part that Megatron-Core holds, found by its own attributes."""
    parts = [trainer] if trainer.mtp is None else [trainer, trainer.mtp]
    buffers = [b for w in trainer.wrapped for b in (*w.buffers, *w.expert_parallel_buffers)]
    if part == "weights":
        return [p.data for c in trainer.chunks for p in c.parameters()] + [b.param_data for b in buffers]
    states = [o.optimizer.state for p in parts for o in p.optimizer.inner.chained_optimizers]
    moments = [s[name] for state in states for s in state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert moments
    masters = [
        tensor
        for o in trainer.optimizer.inner.chained_optimizers
        for group in o.shard_fp32_from_float16_groups
        for tensor in group
    ]
    return moments + masters + [b.grad_data for b in buffers]


def memory(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_sleeps_takes_no_memory(checkpoint, dtype):
    trainer = stepped(checkpoint, dtype=dtype)
    before = {part: memory(held(trainer, part)) for part in ("weights", "optimizer")}
    assert all(before.values())
    trainer.sleep(["optimizer"])
    assert (memory(held(trainer, "weights")), memory(held(trainer, "optimizer"))) == (before["weights"], 0)
    trainer.sleep()
    assert memory(held(trainer, "weights")) == memory(held(trainer, "optimizer")) == 0
    trainer.wake(["weights"])
    assert (memory(held(trainer, "weights")), memory(held(trainer, "optimizer"))) == (before["weights"], 0)
    trainer.wake()
    assert {part: memory(held(trainer, part)) for part in before} == before


def weights_after(checkpoint, sleeps, dtype=torch.float32, **sizes):
    """Every weight after three steps, with sleep between them or without."""
    may_have_children()
    trainer = stepped(checkpoint, dtype=dtype, **sizes)
    for _ in range(2):
        if sleeps:
            trainer.sleep(["optimizer"])
            trainer.log_probs(make_batch(), "old")
            trainer.sleep(["weights"])
            trainer.wake(["weights", "optimizer"])
        trainer.step(make_batch())
    return {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}


def test_bf16_steps_are_the_same_to_the_bit(checkpoint):
    one, other = (weights_after(checkpoint, sleeps, torch.bfloat16) for sleeps in (True, False))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "sizes", [{}, {"ep": 2}, {"tp": 2, "sequence": True}, {"pp": 2}], ids=["data", "expert", "tensor", "pipeline"]
)
@pytest.mark.thorough
def test_two_ranks_step_the_same_to_the_bit(ranks, checkpoint, sizes):
    for rank, same in enumerate(ranks.run(compare, checkpoint, sizes)):
        assert same, f"rank {rank}"


def compare(checkpoint, sizes):
    one, other = (weights_after(checkpoint, sleeps, **sizes) for sleeps in (True, False))
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.thorough
def test_an_mtp_layer_sleeps_too(with_mtp):
    request = MtpRequest("mtp", "mtp", 0.2, None, 1.0)
    model = with_mtp("deepseek_v3", copies=True)
    trainer = stepped(model, mtp=request)
    trainer.sleep()
    assert memory(held(trainer, "weights")) == memory(held(trainer, "optimizer")) == 0
    assert memory([p.data for p in trainer.mtp.layer.parameters()]) == 0
    trainer.wake()
    trainer.step(make_batch())


@pytest.mark.thorough
def test_a_colocated_run_is_the_same_to_the_bit():
    plain = toy_run([], trainer="megatron").metrics
    colocated = toy_run([], trainer="megatron", colocate=True).metrics
    for one, other in zip(plain, colocated, strict=True):
        assert one["train/grad_norm"] == other["train/grad_norm"] and one["reward/mean"] == other["reward/mean"]
        assert other["time/colocate"] > 0
