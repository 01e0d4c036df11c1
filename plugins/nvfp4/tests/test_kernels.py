"""What the kernels do not do, and the largest magnitude; that they run, and give the reference's bytes, are FormatContract's tests."""

import pytest
import torch

from miles_nvfp4.format import Nvfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def called(*args, **kwargs):
    raise AssertionError("a kernel ran")


def test_four_over_six_runs_its_reference(monkeypatch):
    from miles_nvfp4 import kernels

    monkeypatch.setattr(kernels, "quantize", called)
    weight = torch.ones(3, 96, device="cuda")
    assert torch.equal(Nvfp4(four_over_six=True).quantize(weight)["weight"].cpu(), torch.full((3, 48), 0x77).byte())


def test_the_largest_magnitude_is_the_references(monkeypatch):
    weight = torch.randn(1000, 48, device="cuda")
    weight[999, 47] = -7.5
    assert float(Nvfp4().stats(weight)) == 7.5
    weight[3, 3] = float("nan")
    assert bool(Nvfp4().stats(weight).isnan())
    from miles_nvfp4 import kernels

    monkeypatch.setattr(kernels, "largest", called)
    with pytest.raises(AssertionError, match="a kernel ran"):
        Nvfp4().stats(weight)
