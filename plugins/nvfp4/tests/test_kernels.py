"""The kernels are what runs on a GPU; that they give the reference's bytes is FormatContract's test."""

import pytest
import torch

from miles_core.precision.gpu_kernel import reference_only
from miles_nvfp4.format import Nvfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Called(Exception):
    pass


def called(*args, **kwargs):
    raise Called


def test_a_gpu_runs_the_kernels(monkeypatch):
    from miles_nvfp4 import kernels

    for name in ("quantize", "fake_quantize", "largest"):
        monkeypatch.setattr(kernels, name, called)
    format, weight = Nvfp4(), torch.ones(3, 96, device="cuda")
    stats = torch.ones((), device="cuda")
    for act in (lambda: format.quantize(weight, stats), lambda: format.fake_quantize_activation(weight)):
        with pytest.raises(Called):
            act()
        with reference_only():
            act()
    with pytest.raises(Called):
        format.stats(weight)


def test_four_over_six_runs_its_reference(monkeypatch):
    from miles_nvfp4 import kernels

    monkeypatch.setattr(kernels, "quantize", called)
    weight = torch.ones(3, 96, device="cuda")
    assert torch.equal(Nvfp4(four_over_six=True).quantize(weight)["weight"].cpu(), torch.full((3, 48), 0x77).byte())


def test_the_largest_magnitude_is_the_references():
    weight = torch.randn(1000, 48, device="cuda")
    weight[999, 47] = -7.5
    assert float(Nvfp4().stats(weight)) == 7.5
    weight[3, 3] = float("nan")
    assert bool(Nvfp4().stats(weight).isnan())
