"""Gradients that wait for each other: the same sums, whatever waits, and none of a backward pass that failed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.trainer import arriving
from miles_embedded.trainer.optimizer import Optimizer


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(torch.bfloat16)


def gradients(net: nn.Sequential, passes: int = 3) -> dict[str, torch.Tensor]:
    """The FP32 gradients after some backward passes through layers of which one is used twice."""
    optimizer = Optimizer(net, OptimizerConfig())
    for seed in range(passes):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        (net(x).sum() + net[0](2 * x).float().square().sum()).backward()
    return {name: master.grad for name, master in optimizer.masters.items()}


@pytest.mark.parametrize("small, most", [(0, 1 << 24), (1 << 20, 40), (100, 1 << 24)])
def test_the_sums_do_not_depend_on_what_waits(monkeypatch, small, most):
    expected = gradients(network())
    monkeypatch.setattr(arriving, "_SMALL", small)
    monkeypatch.setattr(arriving, "_MOST", most)
    found = gradients(network())
    assert all(g.dtype == torch.float32 and torch.equal(g, expected[n]) for n, g in found.items())


def test_the_sums_are_those_of_rounded_gradients():
    net, twin = network(), network()
    (expected,) = torch.autograd.grad(twin(torch.ones(2, 8, dtype=torch.bfloat16)).sum(), [twin[0].weight])
    optimizer = Optimizer(net, OptimizerConfig())
    for _ in range(3):
        net(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(optimizer.masters["0.weight"].grad, 3 * expected.float())


def test_nothing_is_left_of_a_backward_pass_that_failed():
    net = network()
    optimizer = Optimizer(net, OptimizerConfig())

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("failed")

    hidden = net[0](torch.ones(2, 8, dtype=torch.bfloat16))
    handle = hidden.register_hook(fail)
    with pytest.raises(RuntimeError, match="failed"):
        net[2](net[1](hidden)).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    net(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(optimizer.masters["2.bias"].grad, torch.full((4,), 2.0))
