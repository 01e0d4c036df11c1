import pytest
import torch

from miles_core.algorithm.ratio import KL_TYPES, kl_estimate
from miles_core.errors import ConfigError

# d of the golden table is log pi - log pi_old with the sign turned: k3 there is e^x - 1 - x for x = -d.
D = torch.tensor([-0.1, 0.3, -0.5, 1.0], dtype=torch.float64)


def test_k3_golden():
    value = kl_estimate(D, torch.zeros_like(D), "k3")
    torch.testing.assert_close(
        value, torch.tensor([0.005171, 0.040818, 0.148721, 0.367879]).double(), atol=5e-7, rtol=0
    )


def test_k1_and_k2_are_their_formulas():
    zero = torch.zeros_like(D)
    assert torch.equal(kl_estimate(D, zero, "k1"), D)
    assert torch.equal(kl_estimate(D, zero, "k2"), D * D / 2)


def test_low_var_kl_equals_k3_inside_the_clamps_and_is_bounded_outside():
    zero = torch.zeros_like(D)
    assert torch.equal(kl_estimate(D, zero, "low_var_kl"), kl_estimate(D, zero, "k3"))
    far = torch.tensor([-500.0, -3.0, 5.0, 500.0])
    assert kl_estimate(far, torch.zeros(4), "low_var_kl").tolist() == pytest.approx([10.0, 10.0, 4.0067379, 10.0])


@pytest.mark.parametrize("kind", KL_TYPES)
def test_gradient(kind):
    log_probs = D.clone().requires_grad_()
    kl_estimate(log_probs, torch.zeros_like(D), kind).sum().backward()
    expected = {"k1": torch.ones_like(D), "k2": D}.get(kind, 1 - torch.exp(-D))
    torch.testing.assert_close(log_probs.grad, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_as_a_value(kind):
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_estimate(p.log(), q.log(), kind)).sum(), exact, atol=1e-12, rtol=0)


def test_unknown_kind_names_the_choices():
    with pytest.raises(ConfigError, match=r"'k4'.*k1, k2, k3, low_var_kl"):
        kl_estimate(D, D, "k4")
