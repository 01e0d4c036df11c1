import pytest
import torch

from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.errors import ConfigError, MilesError
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format, Stored, store
from miles_formats.codec import FormatCodec
from miles_formats.fused_experts import Family

PREFIX = "model.layers.0.mlp.experts.0"
GATE, UP, DOWN, NORM = (
    f"{PREFIX}.gate_proj.weight",
    f"{PREFIX}.up_proj.weight",
    f"{PREFIX}.down_proj.weight",
    "norm.weight",
)


class Int8(Format):
    """One scale a tensor, shared by gate and up; K must be even."""

    name = "int8"
    tile = (1, 2)
    couple = (("gate_proj", "up_proj"),)
    error = 0.02

    def refuse(self, shape):
        return f"K = {shape[1]} is odd; {shape[1] + 1} would fit" if shape[1] % 2 else None

    def storage(self, shape):
        return Stored("weight_codes", torch.int8, shape), Stored("weight_scale", torch.float32, ())

    def stats(self, weight):
        return weight.float().abs().amax()

    def quantize(self, weight, stats=None, out=None):
        scale = (self.stats(weight) if stats is None else stats) / 127
        codes = (weight.float() / scale.clamp(min=1e-12)).round().to(torch.int8)
        return store({"weight_codes": codes, "weight_scale": scale}, out)

    def dequantize(self, parts):
        return parts["weight_codes"].float() * parts["weight_scale"]

    def config(self, unquantized):
        return {"quant_method": "int8", "ignore": unquantized}


def units():
    generator = torch.Generator().manual_seed(0)
    gate, up, down = ((torch.randn(4, 6, generator=generator) * s).bfloat16().float() for s in (1, 3, 1))
    return [WeightUnit({GATE: gate, UP: up}), WeightUnit({DOWN: down}), WeightUnit({NORM: torch.ones(6)})]


def test_without_a_format_tensors_travel_as_they_are():
    sent = list(Codec().encode(units()))
    assert [e.name for e in sent] == [GATE, UP, DOWN, NORM] and not any(e.format for e in sent)
    for encoded, unit_tensor in zip(sent, (t for u in units() for t in u.tensors.values()), strict=True):
        assert torch.equal(Codec().decode(encoded), unit_tensor)


def test_stored_names_order_and_values():
    codec = FormatCodec(Int8())
    sent = list(codec.encode(units()))
    assert [(e.name, e.format) for e in sent] == [(GATE, "int8"), (UP, "int8"), (DOWN, "int8"), (NORM, "")]
    assert set(sent[2].parts) == {f"{PREFIX}.down_proj.weight_codes", f"{PREFIX}.down_proj.weight_scale"}
    down = units()[1].tensors[DOWN]
    assert (codec.decode(sent[2]) - down).abs().max() <= down.abs().max() / 254 * 1.001
    assert sent[2].nbytes == 4 * 6 + 4


def test_coupled_weights_are_encoded_with_their_joint_statistics():
    gate, up = FormatCodec(Int8()).encode_unit(units()[0])
    assert torch.equal(gate.parts[f"{PREFIX}.gate_proj.weight_scale"], up.parts[f"{PREFIX}.up_proj.weight_scale"])
    joint = max(t.abs().max() for t in units()[0].tensors.values()) / 127
    assert gate.parts[f"{PREFIX}.gate_proj.weight_scale"] == joint


def test_a_lone_half_is_refused():
    with pytest.raises(ConfigError, match=r"up_proj.* together with .*gate_proj.*did not come"):
        FormatCodec(Int8()).encode_unit(WeightUnit({UP: units()[0].tensors[UP]}))


def test_experts_without_a_gate_have_statistics_of_their_own():
    tensors = units()[0].tensors
    codec = FormatCodec(Int8())
    codec.settle({UP: (4, 6), DOWN: (6, 4)}, Family())
    (up,) = codec.encode_unit(WeightUnit({UP: tensors[UP]}))
    assert up.parts[f"{PREFIX}.up_proj.weight_scale"] == tensors[UP].abs().max() / 127
    codec.settle({GATE: (4, 6), UP: (4, 6), DOWN: (6, 4)}, Family())
    with pytest.raises(ConfigError, match="did not come"):
        codec.encode_unit(WeightUnit({UP: tensors[UP]}))


def test_a_selector_must_not_split_a_couple():
    format = Int8()
    format.skip = ("gate_proj",)
    with pytest.raises(ConfigError, match="left alone by a selector"):
        FormatCodec(format).encode_unit(units()[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(bad):
    weight = torch.ones(4, 6)
    weight[2, 1] = bad
    with pytest.raises(MilesError, match=r"down_proj\.weight holds 1 values .*at \[2, 1\]"):
        list(FormatCodec(Int8()).encode([WeightUnit({DOWN: weight})]))


def test_a_shape_the_format_cannot_store_is_named_with_what_would_fit():
    with pytest.raises(
        ConfigError, match=r"down_proj\.weight \[4, 5\] cannot be stored as int8: K = 5 is odd; 6 would"
    ):
        FormatCodec(Int8()).encode_unit(WeightUnit({DOWN: torch.ones(4, 5)}))


def test_selectors_are_held_against_the_whole_first_stream():
    format = Int8()
    format.skip, format.skip_origin = ("dwn_proj",), "--skip"
    stream = FormatCodec(format).encode(units())
    assert [next(stream).name for _ in range(4)][-1] == NORM
    with pytest.raises(ConfigError, match="'dwn_proj' matches none"):
        next(stream)


def test_codes_of_another_format_are_refused():
    stranger = Encoded(DOWN, {DOWN: torch.ones(1)}, "other")
    for codec in (Codec(), FormatCodec(Int8())):
        with pytest.raises(ConfigError, match="arrived as other"):
            codec.decode(stranger)


def test_weights_are_encoded_anew_at_every_sync():
    codec, weight = FormatCodec(Int8()), torch.ones(2, 2)
    (before,) = codec.encode([WeightUnit({DOWN: weight})])
    weight.mul_(2)
    (after,) = codec.encode([WeightUnit({DOWN: weight})])
    assert codec.decode(before).max() == 1 and codec.decode(after).max() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_quantised_is_the_bf16_rounding(dtype):
    generator, codec = torch.Generator().manual_seed(1), FormatCodec(Int8())
    weight = torch.randn(8, 64, generator=generator, dtype=dtype)
    (found,), (copy,) = (codec.encode_unit(WeightUnit({DOWN: w})) for w in (weight, weight.bfloat16()))
    assert all(torch.equal(found.parts[n], t) for n, t in copy.parts.items())
    direct = codec.format.quantize(weight)
    assert not torch.equal(direct["weight_codes"], found.parts[f"{PREFIX}.down_proj.weight_codes"])
    (norm,) = codec.encode_unit(WeightUnit({NORM: weight[0]}))
    assert torch.equal(norm.parts[NORM], weight[0])
