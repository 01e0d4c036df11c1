"""The optimiser: schedule, decay groups, clipping, masters."""

import math

import pytest
import torch
from torch import nn

from miles_core.errors import MilesError
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.gradient_sum import GRADIENT_SUM
from miles_embedded.trainer.optimizer import Optimizer
from miles_embedded.trainer.optimizer_group import OptimizerGroup, optimizer_group


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)).to(dtype)


def backward(net, scale=1.0):
    (net(torch.ones(2, 4, dtype=next(net.parameters()).dtype)) * scale).sum().backward()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 0.55, None]),
    ],
)
def test_schedules(schedule, expected):
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=2, decay_steps=6, min_lr=0.1)
    for step, rate in enumerate(expected):
        if rate is not None:
            assert config.rate(step) == pytest.approx(rate)
    if schedule != "constant":
        assert config.rate(6) == config.rate(100) == pytest.approx(0.1)


def test_only_matrices_decay():
    net = model()
    optimizer = Optimizer(net, OptimizerConfig(lr=0.1, weight_decay=0.5))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    optimizer.step()
    for name, parameter in net.named_parameters():
        factor = 0.95 if parameter.dim() > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_the_norm_is_clipped_before_the_moments():
    net = model()
    optimizer = Optimizer(net, OptimizerConfig(clip_grad=0.5, betas=(0.0, 0.0)))
    backward(net, 100.0)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters()))
    assert optimizer.step()["grad_norm"] == pytest.approx(norm) and norm > 0.5
    moments = [t for n, t in optimizer.tensors().items() if n.startswith("exp_avg.")]
    assert math.sqrt(sum(float(m.square().sum()) for m in moments)) == pytest.approx(0.5, rel=1e-4)


def test_no_clipping_when_switched_off():
    net = model()
    optimizer = Optimizer(net, OptimizerConfig(clip_grad=0.0, betas=(0.0, 0.0)))
    backward(net, 100.0)
    norm = optimizer.step()["grad_norm"]
    moments = [t for n, t in optimizer.tensors().items() if n.startswith("exp_avg.")]
    assert math.sqrt(sum(float(m.square().sum()) for m in moments)) == pytest.approx(norm, rel=1e-4)


def test_the_first_bad_parameter_is_named():
    net = model()
    optimizer = Optimizer(net, OptimizerConfig())
    backward(net)
    net[1].weight.grad[2] = math.inf
    with pytest.raises(MilesError, match=r"step 1 is (inf|nan), first in 1\.weight \(1 of 5"):
        optimizer.step()
    assert optimizer.step_number == 0 and not any(n.startswith("exp_avg") for n in optimizer.tensors())


def test_small_gradients_of_a_bfloat16_copy_add_up():
    net = model(torch.bfloat16)
    optimizer = Optimizer(net, OptimizerConfig(clip_grad=0.0))
    (net[2].weight * 1.0).sum().backward()
    for _ in range(64):  # 1 + 64 * 2^-9: each addition alone is lost in bfloat16
        (net[2].weight * 2**-9).sum().backward()
    assert net[2].weight.grad is None
    torch.testing.assert_close(optimizer.masters["2.weight"].grad, torch.full((3, 5), 1.125))


class Summed(torch.autograd.Function):
    """Adds the gradient of the weight to its sum, as kernels do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.sum = getattr(weight, GRADIENT_SUM)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        total, add = ctx.sum.take(grad.device)
        mine = grad.float().t() @ ctx.saved_tensors[0].float()
        total.copy_(total + mine if add else mine)
        return None, None


def test_gradients_that_kernels_and_autograd_add_have_one_sum():
    net, expected = model(torch.bfloat16), 0.0
    optimizer = Optimizer(net, OptimizerConfig(lr=0.1))
    weight, x = net[2].weight, torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    for kernel in (True, False, True, True):
        (Summed.apply(x, weight) if kernel else x @ weight.t()).sum().backward()
        ones = torch.ones(3, 7) @ x.float()
        expected = expected + (ones if kernel else ones.bfloat16().float())
        assert weight.grad is None
        torch.testing.assert_close(optimizer.masters["2.weight"].grad, expected)
    optimizer.zero_grad()
    Summed.apply(x, weight).sum().backward()
    torch.testing.assert_close(optimizer.masters["2.weight"].grad, ones)


def test_only_parameters_with_a_separate_master_have_a_sum():
    for dtype in (torch.float32, torch.bfloat16):
        net = model(dtype)
        Optimizer(net, OptimizerConfig(lr=0.1))
        assert all(hasattr(p, GRADIENT_SUM) == (dtype == torch.bfloat16) for p in net.parameters())


def test_a_fixed_rate_leaves_the_schedule_where_it_is():
    net = model()
    optimizer = Optimizer(net, OptimizerConfig(lr=1.0, schedule="linear", decay_steps=4))
    optimizer.fixed_lr = 0.25
    backward(net)
    assert optimizer.step()["lr"] == 0.25
    optimizer.fixed_lr = None
    backward(net)
    assert optimizer.step()["lr"] == 1.0
    backward(net)
    assert optimizer.step()["lr"] == 0.75


def test_frozen_parameters_are_left_out():
    net = model()
    net[0].requires_grad_(False)
    assert set(Optimizer(net, OptimizerConfig()).masters) == {"1.weight", "1.bias", "2.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_is_trained_in_its_own_way(dtype):
    """Its rate, decay and clip norm are separate; the other updates are bit-identical whatever its gradient is."""
    results = []
    for scale in (1.0, 1e3):
        net = model(dtype)
        group = OptimizerGroup("further", lr=0.01, weight_decay=0.0, clip_grad=0.5)
        optimizer_group(net[2].parameters(), group)
        optimizer = Optimizer(net, OptimizerConfig(lr=0.1, clip_grad=0.1))
        backward(net)
        optimizer.masters["2.weight"].grad = torch.full((3, 5), scale)
        metrics = optimizer.step()
        assert metrics["lr"] == 0.1 and metrics["grad_norm/further"] == pytest.approx(scale * math.sqrt(15))
        results.append({n: p.detach().clone() for n, p in net.named_parameters()})
        assert [g["lr"] for g in optimizer._inner.param_groups if g["params"]] == [0.1, 0.1, 0.01]
        # new values written into the parameters are what the next step starts from, without moments
        net[2].weight.data.fill_(0.25)
        group.renewed = True
        backward(net)
        optimizer.masters["2.weight"].grad = torch.full((3, 5), 1.0)
        optimizer.step()
        torch.testing.assert_close(net[2].weight, torch.full((3, 5), 0.24, dtype=dtype), rtol=0, atol=1e-3)
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0] if not n.startswith("2."))


def test_the_rate_of_a_group_rises_in_its_warm_up():
    net = model()
    optimizer_group(net[2].parameters(), OptimizerGroup("further", lr=0.01, warmup=4))
    optimizer = Optimizer(net, OptimizerConfig(lr=0.1))
    rates = []
    for _ in range(6):
        backward(net)
        optimizer.step()
        rates.append([g["lr"] for g in optimizer._inner.param_groups if g["params"]][-1])
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    assert OptimizerGroup("other", warmup=4).rate(0.1, 0) == 0.1, "the model's schedule has a warm-up of its own"
