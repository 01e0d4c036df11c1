"""Parity, on doubles that quantise differently."""

import pytest
import torch

from miles_core.errors import MilesError
from miles_core.mismatch.parity import check, measure, probes
from miles_core.precision.quantizer import BYTES, VALUES, FormatItself, bounded
from miles_fp8.format import Fp8
from miles_fp8.layout import CODES, SCALES


class Reciprocal(FormatItself):
    """Multiplies by 1 / scale, as some kernels do: other codes for some values."""

    def __init__(self, format, weights=BYTES, activations=BYTES):
        super().__init__(format)
        self.weights, self.activations = weights, activations

    def weight(self, weight):
        parts = self.format.quantize(weight)
        scale = (1 / parts[SCALES]).repeat_interleave(128, 0).repeat_interleave(128, 1)
        codes = (weight * scale[: weight.shape[0], : weight.shape[1]]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {**parts, CODES: codes}


class NegativeZeros(FormatItself):
    """Codes of zero with a sign: other bytes, the same values."""

    def weight(self, weight):
        parts = self.format.quantize(weight)
        codes = parts[CODES].view(torch.uint8)
        return {**parts, CODES: torch.where(codes == 0, 0x80, codes).to(torch.uint8).view(torch.float8_e4m3fn)}


class Finer(FormatItself):
    """Reads activations as they are."""

    def activation(self, x):
        return x


def test_what_covers_what():
    assert BYTES.covers(BYTES) and VALUES.covers(BYTES) and bounded(0.1).covers(VALUES)
    assert not BYTES.covers(VALUES) and not VALUES.covers(bounded(0)) and not bounded(0.1).covers(bounded(0.2))
    assert bounded(0.2).covers(bounded(0.1)) and str(bounded(0.1)) == "bounded(0.1)"


def test_the_probes_are_small_and_of_four_kinds():
    found = probes(Fp8(), {"model.layers.0.mlp.up_proj.weight": torch.randn(500, 64)})
    assert list(found) == ["random", "a tile of zeros", "heavy tails", "model.layers.0.mlp.up_proj.weight"]
    assert all(len(t) <= 256 and torch.equal(t.bfloat16().float(), t) for t in found.values())
    assert not found["a tile of zeros"][:128, :128].any()
    tails = found["heavy tails"]
    assert tails.abs().max() > 50 * tails.abs().median()


@pytest.mark.parametrize(
    ("quantizer", "kind", "differing"),
    [(FormatItself, "bytes", 0), (NegativeZeros, "values", 0), (Reciprocal, "bounded", 1e-4)],
)
def test_what_is_measured_of_weights(quantizer, kind, differing):
    weights, activations = measure(Fp8(), quantizer(Fp8()), probes(Fp8()))
    assert weights.parity.kind == kind and weights.differing >= differing
    assert activations.parity == BYTES
    if kind == "bounded":
        assert 0 < weights.parity.eps < 0.01 and weights.differing < 0.01


def test_worse_than_declared_stops():
    real = {"model.layers.7.mlp.up_proj.weight": torch.randn(256, 256)}
    sentence = (
        r"engine double quantises fp8 weights differently than it declares: bytes is declared, measured is bounded"
    )
    with pytest.raises(MilesError, match=sentence):
        check("engine double", Fp8(), Reciprocal(Fp8()), real)
    with pytest.raises(MilesError, match=r"measured is bounded"):
        check("engine double", Fp8(), Reciprocal(Fp8(), weights=bounded(1e-9)), real)
    found = check("engine double", Fp8(), Reciprocal(Fp8(), weights=bounded(0.01)), real)
    assert found.declared == (bounded(0.01), BYTES) and 0 < found.measured[0].parity.eps < 0.01
    assert found.probes == ("random", "a tile of zeros", "heavy tails", "model.layers.7.mlp.up_proj.weight")
    check("engine double", Fp8(), FormatItself(Fp8()), real)
    with pytest.raises(MilesError, match="values of the probe 'random' differ"):
        check("trainer double", Fp8(), Finer(Fp8()))
    with pytest.raises(MilesError, match="trainer double declares no parity for fp8"):
        check("trainer double", Fp8(), None)


def test_nan_is_never_within_bounds():
    class Broken(FormatItself):
        weights = bounded(1e9)

        def weight(self, weight):
            parts = self.format.quantize(weight)
            return {**parts, SCALES: parts[SCALES] * float("nan")}

    with pytest.raises(MilesError, match=r"measured is bounded\(inf\)"):
        check("engine double", Fp8(), Broken(Fp8()))


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_run_is_stopped_before_its_first_step(toy_run, monkeypatch, tmp_path, side):
    from miles_embedded.engine.engine import EmbeddedEngine
    from miles_embedded.trainer.trainer import EmbeddedTrainer

    backend = {"engine": EmbeddedEngine, "trainer": EmbeddedTrainer}[side]
    monkeypatch.setattr(backend, "quantizer", lambda self, format: Reciprocal(format))
    with pytest.raises(MilesError, match=f"{side} embedded quantises fp8 weights differently"):
        toy_run(rollout_fp8=True, train_fp8=True, emulate_precision=True, directory=tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*"))
