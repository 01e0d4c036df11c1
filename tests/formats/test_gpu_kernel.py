"""When a format's kernel may run in place of its reference."""

import pytest
import torch

from miles_core.precision.format import Format, Stored
from miles_formats import gpu_kernel
from miles_formats.gpu_kernel import allocate_output, convert_for_kernel, reference_only, runs_kernels


class OnAGpu:
    """What ``runs_kernels`` asks a tensor, answered as an H200's would."""

    is_cuda, requires_grad, device = True, False, torch.device("cuda", 0)

    def numel(self):
        return 4


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(gpu_kernel, "has_triton", lambda: True)
    return OnAGpu()


class Halves(Format):
    name, tile, error = "halves", (1, 1), 1e-3

    def storage(self, shape):
        return (Stored("weight", torch.float16, shape),)

    def quantize(self, weight, stats=None, out=None):
        raise NotImplementedError

    dequantize = config = quantize


def test_a_tensor_on_the_cpu_takes_the_reference():
    assert not runs_kernels(torch.ones(2, 2))


def test_the_capability_decides(hopper):
    assert runs_kernels(hopper) and runs_kernels(hopper, (8, 9)) and runs_kernels(hopper, (9, 0))
    assert not runs_kernels(hopper, (10, 0))


def test_without_triton_or_on_an_amd_gpu_the_reference_runs(hopper, monkeypatch):
    monkeypatch.setattr(gpu_kernel, "has_triton", lambda: False)
    assert not runs_kernels(hopper)
    monkeypatch.setattr(gpu_kernel, "has_triton", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not runs_kernels(hopper)


def test_a_gradient_to_record_needs_the_reference(hopper):
    hopper.requires_grad = True
    assert not runs_kernels(hopper)
    with torch.no_grad():
        assert runs_kernels(hopper)


def test_an_empty_tensor_takes_the_reference(hopper):
    hopper.numel = lambda: 0
    assert not runs_kernels(hopper)


def test_reference_only_ends_with_its_block(hopper):
    with pytest.raises(ValueError, match="inside"), reference_only():
        assert not runs_kernels(hopper)
        raise ValueError("inside")
    assert runs_kernels(hopper)


def test_dtypes_a_kernel_cannot_read_are_widened():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.ones(2, dtype=dtype)
        assert convert_for_kernel(x) is x
    assert convert_for_kernel(torch.ones(2, dtype=torch.float64)).dtype == torch.float32


def test_a_kernel_writes_into_given_tensors_where_it_can():
    out = {"weight": torch.zeros(4, 6, dtype=torch.float16)}
    assert allocate_output(Halves(), (4, 6), torch.device("cpu"), out) is out
    turned = {"weight": torch.zeros(6, 4, dtype=torch.float16).T}
    made = allocate_output(Halves(), (4, 6), torch.device("cpu"), turned)
    assert made is not turned and made["weight"].is_contiguous()
    assert allocate_output(Halves(), (4, 6), torch.device("cpu"), None)["weight"].shape == (4, 6)
    assert allocate_output(Halves(), (4, 6), torch.device("meta"), out)["weight"].device.type == "meta"


@pytest.mark.parametrize(
    ("capability", "triton", "wrong"),
    [
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.4.0", True),
        ((9, 0), "3.3.1", False),
        ((9, 0), "3.7.1", False),
        ((8, 0), "3.6.0", False),
        ((10, 0), "3.6.0", False),
    ],
)
def test_versions_of_triton_that_compile_the_delta_rule_wrongly(monkeypatch, capability, triton, wrong):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(gpu_kernel, "has_triton", lambda: True)
    monkeypatch.setattr(gpu_kernel.metadata, "version", lambda name: triton)
    assert gpu_kernel.miscompiles_delta_rule.__wrapped__() is wrong


def test_without_a_gpu_nothing_is_compiled():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not gpu_kernel.miscompiles_delta_rule.__wrapped__()
