"""The probe of native products, on doubles that multiply wrongly."""

import pytest
import torch

from miles_core.errors import MilesError
from miles_core.mismatch.parity import check
from miles_core.mismatch.product_probe import check_product
from miles_core.precision.quantizer import FormatItself
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.trainer.trainer import EmbeddedTrainer
from miles_fp8.format import Fp8
from miles_fp8.layout import SCALES
from miles_testing.doubles.product import ExactProduct


def make(kind=ExactProduct):
    return kind(Fp8(), torch.device("cpu"), torch.bfloat16)


class ScalesAcross(ExactProduct):
    """Reads the scale of the neighbouring block along K: a layout that was misunderstood."""

    def prepare(self, parts):
        return {**parts, SCALES: parts[SCALES].roll(1, 1)}


class OneRowOff(ExactProduct):
    """Gives a row the result of the row before it, from the second tile on."""

    def __call__(self, x, weight, bias=None):
        y = super().__call__(x, weight, bias)
        y[32:] = y[31:-1].clone() if len(y) > 32 else y[32:]
        return y


class NoBias(ExactProduct):
    def __call__(self, x, weight, bias=None):
        return super().__call__(x, weight)


class NotANumber(ExactProduct):
    def __call__(self, x, weight, bias=None):
        return super().__call__(x, weight, bias) * float("nan")


class Wide(ExactProduct):
    def __call__(self, x, weight, bias=None):
        return super().__call__(x, weight, bias).float()


class Truncating(ExactProduct):
    """Never promoted: a running sum of 14 bits, cut off every 32 elements, as in Hopper's own accumulator."""

    def __call__(self, x, weight, bias=None):
        left, right = self.format.fake_quantize_activation(x.float()), self.format.dequantize(weight)
        total = torch.zeros(len(left), len(right))
        for a, b in zip(left.split(32, 1), right.split(32, 1), strict=True):
            mantissa, exponent = torch.frexp(total + a @ b.T)
            total = torch.ldexp((mantissa * 2**14).trunc() / 2**14, exponent)
        return (total if bias is None else total + bias).to(self.dtype)


class Unsupported(ExactProduct):
    def __call__(self, x, weight, bias=None):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul\nmore")


def test_the_exact_product_passes_and_its_distance_is_that_of_rounding_to_bfloat16():
    product = make()
    distance = check_product("engine double", Fp8(), product, [(256, 384), (256, 384)], {"w": torch.randn(64, 256)})
    assert 0.001 < distance < 0.005
    assert {rows for rows, n, k in product.calls if (n, k) == (256, 384)} == {1, 37, 256}
    assert product.calls.count((37, 256, 384)) == 1  # a shape once
    assert (37, 64, 256) in product.calls


@pytest.mark.parametrize("kind", [ScalesAcross, OneRowOff, NoBias, NotANumber, Wide, Truncating])
def test_a_wrong_product_is_stopped(kind):
    with pytest.raises(
        MilesError, match=r"engine double multiplies fp8 codes differently than it declares: bounded\(0.01\)"
    ):
        check_product("engine double", Fp8(), make(kind))


def test_a_product_that_fails_is_a_sentence():
    with pytest.raises(MilesError) as refusal:
        check_product("engine double", Fp8(), make(Unsupported))
    text = str(refusal.value)
    assert "cannot multiply fp8 codes on the probe '1 x [384, 640]' (CUBLAS_STATUS_NOT_SUPPORTED when" in text
    assert "more" not in text and text.endswith("give --quantized-product emulated")


def test_shapes_that_the_product_does_not_take_are_not_probed():
    class Even(ExactProduct):
        def takes(self, shape):
            return shape[1] % 256 == 0

    product = make(Even)
    check_product("engine double", Fp8(), product, [(64, 128)])
    assert {k for _, _, k in product.calls} == {32768}


def test_parity_covers_the_product():
    found = check("engine double", Fp8(), FormatItself(Fp8(), make(), [(128, 256)])).to_dict()["products"]
    assert found["declared"] == "bounded(0.01)" and found["measured"].startswith("bounded(0.00")
    assert "products" not in check("engine double", Fp8(), FormatItself(Fp8())).to_dict()
    with pytest.raises(MilesError, match="multiplies fp8 codes differently"):
        check("engine double", Fp8(), FormatItself(Fp8(), make(NoBias)))


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_run_is_stopped_before_its_first_step(toy_run, monkeypatch, tmp_path, side):
    backend = {"engine": EmbeddedEngine, "trainer": EmbeddedTrainer}[side]
    monkeypatch.setattr(backend, "quantizer", lambda self, format: FormatItself(format, make(NoBias)))
    with pytest.raises(MilesError, match=f"{side} embedded multiplies fp8 codes differently"):
        toy_run(rollout_fp8=True, train_fp8=True, emulate_precision=True, directory=tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*"))
