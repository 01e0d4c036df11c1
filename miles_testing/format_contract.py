"""Contract tests for number formats: the properties of a ``Format`` on which core relies.

Three lines apply them to a format; pytest collects the class like any test class::

    class TestMyFormat(FormatContract):
        def make(self):
            return MyFormat()

Add tests of the format's golden values next to this suite. A backend may extend it with tests of formats inside its models.
"""

from __future__ import annotations

import importlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import ConfigError, MilesError
from miles_core.mismatch.product_probe import check_product
from miles_core.precision.format import Format, Parts
from miles_core.precision.product import NoProduct
from miles_formats.codec import FormatCodec
from miles_formats.gpu_kernel import reference_only


class FormatContract:
    """Subclass it and implement ``make``; override the attributes below as needed.

    Attributes:
        rows, columns: a size that the format can store, a multiple of its tile.
        magnitudes: scales of N(0, 1) for which the declared error holds.
        drift: relative change of a value that is quantised twice.
        kernels: name of the module with the format's GPU kernels, ``quantize`` and (if activations are quantised)
            ``fake_quantize``; "" if there are none.
    """

    rows, columns = 256, 512
    magnitudes: tuple[float, ...] = (1e-3, 1e3)
    drift = 0.0
    kernels = ""

    @abstractmethod
    def make(self) -> Format:
        """Make the format under test."""

    # -- numbers ----------------------------------------------------------------------------------------------------

    def test_storage_is_as_declared(self) -> None:
        format = self.make()
        parts = format.quantize(normal(self.rows, self.columns))
        declared = {s.suffix: (s.dtype, s.shape) for s in format.storage((self.rows, self.columns))}
        assert {k: (t.dtype, tuple(t.shape)) for k, t in parts.items()} == declared
        nbytes = sum(t.numel() * t.element_size() for t in parts.values())
        assert format.nbytes((self.rows, self.columns)) == nbytes < 4 * self.rows * self.columns

    def test_weights_that_are_stored_together_have_the_values_they_have_alone(self) -> None:
        format = self.make()
        single = [format.quantize(normal(self.rows, self.columns) * scale) for scale in (1.0, 3.0, 0.1)]
        together = {suffix: torch.stack([parts[suffix] for parts in single]) for suffix in single[0]}
        expected = torch.stack([format.dequantize(parts) for parts in single]).bfloat16()
        out = torch.empty_like(expected)
        for values in (out, out.transpose(1, 2).contiguous().transpose(1, 2)):
            format.dequantize_stacked(together, values)
            assert torch.equal(values, expected)
            values.zero_()

    def test_a_checkpoint_in_this_format_is_recognised(self) -> None:
        format, shape = self.make(), (self.rows, self.columns)
        block = json.loads(json.dumps(format.config(["lm_head"])))
        assert type(format).recognises(block) and not type(format).recognises({"quant_method": "another"})
        again = type(format).from_checkpoint(block)
        assert again.config(["lm_head"]) == block
        parts = format.quantize(normal(self.rows, self.columns))
        assert again.shape_of({suffix: tuple(t.shape) for suffix, t in parts.items()}) == shape
        assert again.shape_of({suffix: (3, *t.shape) for suffix, t in parts.items()}) is None
        assert torch.equal(again.dequantize(parts), format.dequantize(parts))

    def test_the_round_trip_stays_within_the_declared_error(self) -> None:
        format, weight = self.make(), normal(self.rows, self.columns)
        found = format.dequantize(format.quantize(weight))
        assert found.dtype == torch.float32 and found.shape == weight.shape
        error = float((found - weight).norm() / weight.norm())
        assert 0 < error <= format.error, f"relative RMS error {error:.4f}, declared {format.error}"

    def test_the_error_does_not_depend_on_the_magnitude(self) -> None:
        format = self.make()
        for magnitude in self.magnitudes:
            weight = normal(self.rows, self.columns) * magnitude
            found = format.dequantize(format.quantize(weight))
            assert float((found - weight).norm() / weight.norm()) <= format.error, magnitude

    def test_zeros_stay_zero(self) -> None:
        format, weight = self.make(), normal(self.rows, self.columns)
        weight[: format.tile[0], : format.tile[1]] = 0
        found = format.dequantize(format.quantize(weight))
        assert bool((found[: format.tile[0], : format.tile[1]] == 0).all()) and bool(found.isfinite().all())
        zeros = torch.zeros(self.rows, self.columns)
        assert torch.equal(format.dequantize(format.quantize(zeros)).abs(), zeros)

    def test_a_ragged_edge_is_padded_with_zeros_or_refused(self) -> None:
        format = self.make()
        shape = (self.rows - 1, self.columns - 3)
        why = format.refuse(shape)
        if why is not None:
            assert any(character.isdigit() for character in why), f"the reason must name sizes that fit: {why!r}"
            return
        whole = torch.zeros(self.rows, self.columns)
        whole[: shape[0], : shape[1]] = normal(*shape)
        ragged = format.dequantize(format.quantize(whole[: shape[0], : shape[1]]))
        assert torch.equal(ragged, format.dequantize(format.quantize(whole))[: shape[0], : shape[1]])

    def test_quantising_twice_changes_nothing(self) -> None:
        format = self.make()
        once = format.quantize(normal(self.rows, self.columns))
        values = format.dequantize(once)
        twice = format.quantize(values)
        torch.testing.assert_close(format.dequantize(twice), values, rtol=self.drift, atol=0)
        if format.exact:
            assert_same(once, twice)

    def test_a_view_in_another_dtype_gives_the_codes_of_its_numbers(self) -> None:
        format = self.make()
        strided = normal(self.columns, self.rows).bfloat16().T
        before = strided.clone()
        assert_same(format.quantize(strided), format.quantize(strided.float().contiguous()))
        assert torch.equal(strided, before), "quantize must not modify the weight"

    def test_given_tensors_are_filled(self) -> None:
        format, weight = self.make(), normal(self.rows, self.columns)
        out = {s.suffix: torch.empty(s.shape, dtype=s.dtype) for s in format.storage((self.rows, self.columns))}
        found = format.quantize(weight, out=out)
        assert all(found[suffix] is tensor for suffix, tensor in out.items())
        assert_same(out, format.quantize(weight))

    def test_a_tile_does_not_depend_on_its_neighbours(self) -> None:
        format, weight = self.make(), normal(self.rows, self.columns)
        stats = format.stats(weight)
        before = format.dequantize(format.quantize(weight, stats))
        weight[: format.tile[0], : format.tile[1]] *= 0.5  # smaller, so that the statistics do not change
        after = format.dequantize(format.quantize(weight, stats))
        changed = (before != after).nonzero()
        assert len(changed) and bool((changed < torch.tensor(format.tile)).all())

    def test_the_config_block_names_what_is_left_alone(self) -> None:
        block = self.make().config(["lm_head", "model.layers.0.mlp.gate"])
        assert block["quant_method"] and "model.layers.0.mlp.gate" in str(block)

    # -- activations ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_an_activation_keeps_its_shape_and_depends_on_its_own_token(self, dtype: torch.dtype) -> None:
        format, x = self.make(), normal(3, 5, self.columns).to(dtype)
        together = format.fake_quantize_activation(x)
        assert together.shape == x.shape and together.dtype == dtype
        assert torch.equal(together, torch.stack([format.fake_quantize_activation(row) for row in x]))
        other = x.clone()
        other[0] *= 1000
        assert torch.equal(format.fake_quantize_activation(other)[1:], together[1:])
        assert format.quantizes_activations or torch.equal(together, x)

    def test_activations_of_zero_stay_and_what_is_not_finite_shows(self) -> None:
        format, x = self.make(), normal(4, self.columns)
        x[1] = 0
        x[2, 3] = float("nan")
        found = format.fake_quantize_activation(x)
        assert bool((found[1] == 0).all()) and bool(found[[0, 3]].isfinite().all()) and bool(found[2, 3].isnan())

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("magnitude", [1.0, 1e-4, 1e-33, 1e-39, 1e30])
    def test_a_gpu_gives_the_same_bytes(self, magnitude: float) -> None:
        format, weight = self.make(), normal(self.rows, self.columns) * magnitude
        here, there = format.quantize(weight), format.quantize(weight.cuda())
        assert_same({k: t.cpu() for k, t in there.items()}, here)
        assert torch.equal(format.dequantize(there).cpu(), format.dequantize(here))
        found = format.fake_quantize_activation(weight.cuda()).cpu()
        assert torch.equal(found, format.fake_quantize_activation(weight))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_gpu_runs_the_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not self.kernels:
            pytest.skip("the format has no kernels")
        format, weight = self.make(), normal(self.rows, self.columns).cuda()
        stats, module = format.stats(weight), importlib.import_module(self.kernels)
        acts: dict[str, Callable[[], object]] = {"quantize": lambda: format.quantize(weight, stats)}
        if format.quantizes_activations:
            acts["fake_quantize"] = lambda: format.fake_quantize_activation(weight)
        for name, act in acts.items():
            monkeypatch.setattr(module, name, _raise_called)
            with pytest.raises(_Called):
                act()
            with reference_only():
                act()

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_gpu_kernel_gives_the_bytes_of_the_reference(self) -> None:
        format = self.make()
        for name, weight in hard_cases(self.rows, self.columns, format.tile):
            there = weight.cuda()
            with reference_only():
                here, expected = format.quantize(weight), format.quantize(there)
                x = format.fake_quantize_activation(there)
            for parts in (expected, format.quantize(there)):
                assert_same({k: t.cpu() for k, t in parts.items()}, here, name)
            out = {k: torch.empty_like(t) for k, t in expected.items()}
            assert_same(format.quantize(there, format.stats(there), out), expected, name)
            with reference_only():
                values = format.dequantize(expected)
            torch.testing.assert_close(format.dequantize(expected), values, rtol=0, atol=0, msg=name)
            rounded = format.fake_quantize_activation(there)
            assert rounded.dtype == x.dtype
            torch.testing.assert_close(rounded, x, rtol=0, atol=0, msg=name)
            if not format.quantizes_activations:
                continue
            there[0, 0], there[-1, -1] = float("nan"), float("-inf")
            with reference_only():
                x = format.fake_quantize_activation(there)
            rounded = format.fake_quantize_activation(there)
            torch.testing.assert_close(rounded, x, rtol=0, atol=0, equal_nan=True, msg=name)

    # -- products ---------------------------------------------------------------------------------------------------

    def test_a_product_that_cannot_run_is_refused_with_the_reason(self) -> None:
        with pytest.raises(NoProduct) as refusal:
            self.make().product(torch.device("cpu"), torch.bfloat16)
        assert len(str(refusal.value).split()) > 4, "the error must contain a reason"

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_product_of_codes_is_as_close_to_the_emulated_one_as_it_declares(self) -> None:
        format = self.make()
        try:
            product = format.product(torch.device("cuda"), torch.bfloat16)
        except NoProduct as why:
            pytest.skip(str(why))
        ragged = (self.rows - 1, self.columns - 3), (self.rows - 16, self.columns - 16)
        real = {"hard": normal(self.rows, self.columns) / normal(self.columns)}
        assert check_product("here", format, product, [(self.rows, self.columns), *ragged], real) > 0

    # -- the same bytes on every side -------------------------------------------------------------------------------

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_a_weight_that_is_not_finite_is_refused_by_name(self, bad: float) -> None:
        self._check_refused(bad, "cpu")

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_a_gpu_refuses_a_weight_that_is_not_finite(self, bad: float) -> None:
        self._check_refused(bad, "cuda")

    def _check_refused(self, bad: float, device: str) -> None:
        format = self.make()
        for row, column in ((3, 5), (self.rows - 1, self.columns - 1)):
            unit = make_unit(format, self.rows, self.columns)
            unit.tensors = {name: tensor.to(device) for name, tensor in unit.tensors.items()}
            name = list(unit.tensors)[-1]
            unit.tensors[name][row, column] = bad
            with pytest.raises(MilesError, match=name.replace(".", r"\.") + f" holds 1 values .* at .{row}, {column}"):
                FormatCodec(format).encode_unit(unit)

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_weights_that_are_encoded_together_get_the_bytes_they_get_alone(self, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        format, (rows, columns) = self.make(), (self.rows, self.columns)
        joined = normal(3, 2 * rows, columns).bfloat16().to(device)
        weights = [joined[1, :rows], joined[0, rows:], joined[2, :rows].contiguous(), joined[0, :, : columns // 2]]
        weights += [normal(rows, columns).to(device), normal(columns, rows).bfloat16().to(device).t()]
        outs: list[Parts | None] = [None] * len(weights)
        stored = format.storage((rows, columns))
        outs[2] = {s.suffix: torch.zeros(s.shape, dtype=s.dtype, device=device) for s in stored}
        for weight, out, parts in zip(weights, outs, format.quantize_all(weights, outs), strict=True):
            assert_same(parts, format.quantize(weight))
            assert out is None or all(parts[suffix] is tensor for suffix, tensor in out.items())

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_a_writer_encodes_the_current_values_to_the_same_tensors(self, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        format, (rows, columns) = self.make(), (self.rows, self.columns)
        joined = normal(3, 2 * rows, columns).bfloat16().to(device)
        weights = [joined[1, :rows], joined[0, rows:], joined[2, :rows].contiguous(), joined[0, :rows].float()]
        outs = [
            {s.suffix: torch.zeros(s.shape, dtype=s.dtype, device=device) for s in format.storage((rows, columns))}
            for _ in weights
        ]
        write = format.make_writer(weights, outs)
        for factor in (1, -3, 0.5):
            for weight in weights:
                weight.mul_(factor)
            write()
            for weight, out in zip(weights, outs, strict=True):
                assert_same(out, format.quantize(weight))

    def test_coupled_weights_share_their_statistics(self) -> None:
        format = self.make()
        if not format.couple:
            pytest.skip("the format couples no weights")
        unit = make_unit(format, self.rows, self.columns)
        unit.tensors = {name: tensor.bfloat16() for name, tensor in unit.tensors.items()}
        small, large = list(unit.tensors)[:2]
        unit.tensors[small] *= 0.1
        joint = torch.stack([s for t in unit.tensors.values() if (s := format.stats(t)) is not None]).amax(0)
        encoded = {e.name: suffixes(e.parts) for e in FormatCodec(format).encode_unit(unit)}
        assert_same(encoded[small], format.quantize(unit.tensors[small], joint))
        alone = format.quantize(unit.tensors[small])
        differ = [k for k, t in alone.items() if not torch.equal(t.float(), encoded[small][k].float())]
        assert differ, "quantize ignores the statistics it receives"
        with pytest.raises(ConfigError, match="together"):
            FormatCodec(format).encode_unit(WeightUnit({large: unit.tensors[large]}))


class _Called(Exception):
    """Raised instead of running a kernel."""


def _raise_called(*args: object, **kwargs: object) -> None:
    raise _Called


def normal(*shape: int) -> Tensor:
    """Return N(0, 1) numbers with a fixed seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def hard_cases(rows: int, columns: int, tile: tuple[int, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield finite weights that reveal different rounding, flushed denormals or wrong borders in a kernel."""
    generator = torch.Generator().manual_seed(1)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int32)

    def numbers(exponents: Tensor) -> Tensor:
        signs_and_mantissas = integers(-(2**31), 2**31 - 1) & ~0x7F800000
        return (signs_and_mantissas | (exponents << 23)).view(torch.float32)

    yield "any bits", numbers(integers(0, 255))
    yield "near one", numbers(integers(115, 140))
    yield "near one, bf16", numbers(integers(115, 140)).bfloat16()
    yield "near one, fp16", numbers(integers(115, 130)).half()
    yield "near one, fp64", numbers(integers(115, 140)).double()
    yield "denormals", numbers(integers(0, 2))
    yield "denormal scales", numbers(integers(0, 12))
    yield "the largest", numbers(integers(250, 255))
    for peak in (448.0, 7.0, 6.0):  # a block with the largest value of an element type as maximum has a scale near 1
        ties = integers(-31, 32) * 2.0 ** integers(-12, -2)
        ties[:, :: tile[1]] = peak
        yield f"ties under {peak}", ties
        yield f"ties under {peak} * 2^-20", ties * 2.0**-20
        ties[::2, : tile[1]] = 0
        yield f"ties under {peak}, blocks of zeros", ties.bfloat16()
    whole = numbers(integers(100, 130))
    yield "columns first", whole.T.contiguous().T
    yield "every second row", whole[::2]
    narrow = max(columns - tile[1], tile[1])
    yield "another width", whole[:-1, :narrow]
    yield "one row", whole[:1, :narrow].bfloat16()


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], case: str = "") -> None:
    """Check that the tensors are equal byte for byte."""
    assert found.keys() == expected.keys()
    for suffix, tensor in expected.items():
        assert found[suffix].dtype == tensor.dtype
        ours, theirs = (
            t.flatten().view(torch.uint8) for t in (found[suffix], tensor)
        )  # flatten: a scalar cannot be viewed as bytes
        assert torch.equal(ours, theirs), (
            f"{case} {suffix}: {int((ours != theirs).sum())} of {theirs.numel()} bytes differ"
        )


def suffixes(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace stored names by their suffixes."""
    return {name.rpartition(".")[2]: tensor for name, tensor in parts.items()}


def make_unit(format: Format, rows: int, columns: int) -> WeightUnit:
    """Return one expert's weights as a unit: a whole couple, or a single weight."""
    members = format.couple[0] if format.couple else ("down_proj",)
    return WeightUnit({f"model.layers.0.mlp.experts.0.{m}.weight": normal(rows, columns) for m in members})
