"""Which product runs: what the user asked for, and what the format can do here."""

import logging

import pytest
import torch
from torch import nn

from miles_core.config.load import load
from miles_core.errors import ConfigError
from miles_core.precision.product import NoProduct
from miles_core.precision.products import Products, emulate_product
from miles_formats import scaled_mm
from miles_fp8.format import Fp8
from miles_testing.doubles.product import ExactProduct

MODEL = nn.Linear(16, 16)


class Native(Fp8):
    def product(self, device, dtype):
        return ExactProduct(self, device, dtype)


def products(*flags):
    return Products.from_config(load(["--rollout-precision", "fp8", *flags]))


def test_auto_takes_what_there_is(caplog):
    found = products().of(Native(), MODEL)
    assert isinstance(found, ExactProduct) and (found.device.type, found.dtype) == ("cpu", torch.float32)
    with caplog.at_level(logging.INFO):
        assert products().of(Fp8(), MODEL) is None
    assert (
        "fp8: products are emulated, because it needs tensor cores of an NVIDIA GPU, and the model is on the cpu"
        in (caplog.text)
    )
    assert products().of(None, MODEL) is None


def test_who_asks_for_emulation_gets_it():
    for flags in (["--quantized-product", "emulated"], ["--emulate-precision"]):
        assert products(*flags).of(Native(), MODEL) is None


def test_native_is_refused_where_it_cannot_be_had():
    native = products("--quantized-product", "native")
    assert isinstance(native.of(Native(), MODEL), ExactProduct)
    with pytest.raises(
        ConfigError, match=r"--quantized-product native: the product of fp8 codes cannot run here, because"
    ):
        native.of(Fp8(), MODEL)


def test_a_format_without_a_product_says_so():
    from miles_int4.format import Int4

    with pytest.raises(NoProduct, match="int4 has no native product"):
        Int4().product(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"quantized_product": "native"}, "--quantized-product native: it needs rollout.precision != bf16 or"),
        ({"quantized_product": "emulated"}, "--quantized-product emulated: it needs rollout.precision != bf16 or"),
        (
            {"quantized_product": "native", "emulate_precision": True, "train_precision": "fp8"},
            "a native product needs the tensor cores",
        ),
    ],
)
def test_a_choice_without_effect_is_refused(plan, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan(**options)


@pytest.mark.parametrize(
    ("capability", "dtype", "cuda", "triton", "sentence"),
    [
        ((9, 0), torch.bfloat16, "13.0", True, None),
        ((8, 9), torch.bfloat16, "13.0", True, "it needs sm_90, and this GPU is sm_89"),
        ((10, 0), torch.bfloat16, "13.0", True, "it needs sm_90, and this GPU is sm_100"),
        ((9, 0), torch.float32, "13.0", True, r"its results are bfloat16, and the model is float32 \(--dtype\)"),
        ((9, 0), torch.bfloat16, "12.8", True, "it needs torch built for CUDA 12.9 or later, and this one is for 12.8"),
        ((9, 0), torch.bfloat16, "13.0", False, "Triton is not installed"),
    ],
)
def test_the_capability_and_the_libraries_decide(monkeypatch, capability, dtype, cuda, triton, sentence):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(scaled_mm, "has_triton", lambda: triton)
    device = torch.device("cuda", 0)
    if sentence is None:
        assert Fp8().product(device, dtype).dtype == dtype
        return
    with pytest.raises(NoProduct, match=sentence):
        Fp8().product(device, dtype)


def test_another_form_of_the_activation_rule_is_emulated():
    with pytest.raises(NoProduct, match="its kernel divides activations, and --fp8-activation-form is ratio"):
        Fp8(activation_form="ratio").product(torch.device("cuda", 0), torch.bfloat16)


def test_an_amd_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(NoProduct, match="the model is on an AMD GPU"):
        Fp8().product(torch.device("cuda", 0), torch.bfloat16)


def test_the_emulated_product_is_that_of_the_dequantised_codes():
    format, x, weight = Fp8(), torch.randn(3, 200).bfloat16(), torch.randn(20, 200)
    parts = format.quantize(weight)
    expected = format.fake_quantize_activation(x).float() @ format.dequantize(parts).bfloat16().float().T
    torch.testing.assert_close(emulate_product(format, x, parts).float(), expected, rtol=1e-2, atol=1e-2)
