"""The grouped product of experts, against one product an expert."""

import pytest
import torch
from torch import nn

from miles_megatron.trainer.products import add_gradients_in_place, multiply_experts_together

pytestmark = pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="needs torch 2.10")

COUNTS = [5, 0, 11]


class Experts(nn.Module):
    """What is used of TransformerEngine's ``GroupedLinear``."""

    num_gemms, use_bias, fuse_wgrad_accumulation = 3, False, False

    def __init__(self):
        super().__init__()
        for i in range(3):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.randn(24, 16, dtype=torch.bfloat16)))

    def forward(self, x, counts):
        rows = zip(x.split(counts), self.parameters(), strict=True)
        return torch.cat([part @ weight.t() for part, weight in rows]), None


def gradients(module):
    """Of the input and of each weight."""
    torch.manual_seed(1)
    x = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)
    y, bias = module(x, COUNTS)
    assert bias is None
    y.backward(torch.randn(16, 24, dtype=torch.bfloat16))
    return y.detach(), x.grad, *(weight.grad for weight in module.parameters())


@pytest.fixture
def experts():
    torch.manual_seed(0)
    return Experts()


@pytest.fixture
def expected(experts):
    found = gradients(experts)
    experts.zero_grad()
    return found


def test_it_is_every_expert_s_own_product(experts, expected):
    multiply_experts_together([experts], notify=False)
    for one, other in zip(gradients(experts), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("notify", [False, True])
def test_weight_gradients_are_added_where_they_are_kept(experts, expected, notify):
    multiply_experts_together([experts], notify)
    add_gradients_in_place([nn.Sequential(nn.Linear(2, 2), experts)])
    for weight in experts.parameters():
        weight.main_grad = torch.ones(24, 16)
    gradients(experts)
    for weight, grad in zip(experts.parameters(), expected[2:], strict=True):
        assert weight.grad_added_to_main_grad and (weight.grad is not None) == notify
        torch.testing.assert_close(weight.main_grad, 1 + grad.float())


def test_frozen_weights_get_no_gradient(experts, expected):
    multiply_experts_together([experts.requires_grad_(False)], notify=False)
    _, to_x, *none = gradients(experts)
    torch.testing.assert_close(to_x, expected[1])
    assert none == [None] * 3


def test_biases_are_left_to_transformer_engine(experts):
    experts.use_bias = True
    multiply_experts_together([experts], notify=False)
    assert "forward" not in vars(experts)
