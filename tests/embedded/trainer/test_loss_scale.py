"""FP16 training: overflows skip a step and halve the scale, and checkpoints contain it. Optimizer state between steps in host memory."""

import json
import math

import pytest
import torch
from torch import nn

from miles_core.errors import ConfigError, NonFiniteError, PlanError
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.trainer.loss_scale import LossScale
from miles_embedded.trainer.optimizer import Optimizer
from miles_testing import plan, toy_run


def test_the_scale_grows_after_a_window_and_shrinks_at_an_overflow():
    scale = LossScale(8.0, window=2)
    scale.accept()
    assert (scale.value, scale.clean) == (8.0, 1)
    scale.accept()
    assert (scale.value, scale.clean) == (16.0, 0)
    scale.accept()
    scale.shrink()
    assert (scale.value, scale.clean) == (8.0, 0)
    scale.accept()
    other = LossScale(window=2)
    other.load_state(json.loads(json.dumps(scale.state())))
    other.accept()
    assert other.value == 16.0  # the window continues


def make(scale, offload=False):
    torch.manual_seed(0)
    net = nn.Linear(4, 3, bias=False).to(torch.float16)
    return net, Optimizer(net, OptimizerConfig(lr=0.1, clip_grad=0.0, weight_decay=0.0), None, None, scale, offload)


@pytest.mark.parametrize("offload", [False, True])
def test_gradients_too_small_for_fp16_arrive(offload):
    """2^-30 is zero in FP16, and 2^-14 is not."""
    found = {}
    for value in (1.0, 2.0**16):
        net, optimizer = make(LossScale(value), offload)
        before = net.weight.detach().clone()
        optimizer.scale((net.weight.float() * 2.0**-30).sum()).backward()
        optimizer.unscale()
        grad = optimizer.masters["weight"].grad
        found[value] = float(grad.max())
        assert optimizer.step()["grad_norm"] == pytest.approx(found[value] * math.sqrt(12))
        assert torch.equal(net.weight, before) is (value == 1.0)
    assert found == {1.0: 0.0, 2.0**16: 2.0**-30}


def test_an_overflow_changes_only_the_scale():
    net, optimizer = make(LossScale(2.0**10))
    start = {n: t.clone() for n, t in optimizer.tensors().items()}
    optimizer.scale((net.weight.float() * 2.0**10).sum()).backward()  # 2^20 overflows
    optimizer.unscale()
    metrics = optimizer.step()
    assert metrics == {"loss_scale": 2.0**10, "skipped_steps": 1.0, "lr": 0.1}
    assert optimizer.loss_scale.value == 2.0**9 and optimizer.step_number == 0
    after = optimizer.tensors()
    assert start.keys() == after.keys() and all(torch.equal(start[n], after[n]) for n in start)
    assert optimizer.masters["weight"].grad is None
    optimizer.scale((net.weight.float() * 2.0**6).sum()).backward()
    optimizer.unscale()
    assert optimizer.step()["skipped_steps"] == 0.0 and optimizer.step_number == 1


def test_without_a_smaller_scale_the_overflow_is_named():
    net, optimizer = make(LossScale(1.0))
    net.weight.grad = None
    (net.weight.float() * math.inf).sum().backward()
    with pytest.raises(NonFiniteError, match="first in weight"):
        optimizer.step()


def test_masters_and_state_have_no_device_memory_between_steps():
    net, optimizer = make(None, offload=True)
    plain, other = make(None)
    for _ in range(3):
        for each, own in ((net, optimizer), (plain, other)):
            (each.weight.float().square()).sum().backward()
            assert own.step()["grad_norm"] > 0
    held = [optimizer.masters["weight"], *optimizer._inner.state[optimizer.masters["weight"]].values()]
    assert [t.untyped_storage().nbytes() for t in held if t.dim()] == [0, 0, 0]
    assert list(optimizer.memory()) == [] and len(list(other.memory())) == 3
    assert torch.equal(net.weight, plain.weight)
    with optimizer.on_device():
        expected = other.tensors()
        assert all(torch.equal(t, expected[n]) for n, t in optimizer.tensors().items())


def test_a_run_in_fp16_skips_learns_and_resumes(tmp_path):
    options = {"dtype": "float16", "num_steps_per_rollout": 2, "initial_loss_scale": 2.0**19, "loss_scale_window": 3}
    whole = toy_run(steps=5, **options)
    skipped = [m["train/skipped_steps"] for m in whole.metrics]
    assert skipped[0] > 0 == skipped[-1] and "train/grad_norm" in whole.metrics[-1]
    toy_run(directory=tmp_path / "run", steps=3, **options)
    noted = json.loads((tmp_path / "run/checkpoints/step_00000003/policy/trainer/trainer.json").read_text())
    assert noted["loss_scale"]["value"] < 2.0**19 and noted["step"] == 6 - 2 * sum(skipped[:3])
    again = toy_run(directory=None, save=None, load=tmp_path / "run", steps=5, **options)
    names = [n for n in whole.metrics[-1] if n.startswith("train/")]
    assert [[m[n] for n in names] for m in again.metrics[3:]] == [[m[n] for n in names] for m in whole.metrics[3:]]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fp16": True, "train_precision": "fp8", "rollout_precision": "fp8"}, "would round FP16 weights"),
        ({"fp16": True, "trainer": "megatron"}, "scales no loss"),
    ],
)
def test_refused(options, why):
    with pytest.raises(PlanError) as error:
        plan(**options)
    assert why in str(error.value)


@pytest.mark.parametrize("options", [{"initial_loss_scale": 8}, {"dtype": "bfloat16", "loss_scale_window": 8}])
def test_only_fp16_training_scales_the_loss(options):
    with pytest.raises(ConfigError, match=r"it needs model.dtype == float16, and --dtype is"):
        plan(**options)
