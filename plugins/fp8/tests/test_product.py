"""The product of FP8 codes: its operands on any machine, itself where there is a Hopper GPU."""

import asyncio
import gc
import math

import pytest
import torch

from miles_core.engine import Request, Sampling
from miles_core.mismatch.product_probe import check_product
from miles_embedded import load_model
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.operations import TORCH, use_operations
from miles_embedded.model.storage import codes_of
from miles_embedded.model.views import export
from miles_embedded.quantized.activation import RoundedInputs
from miles_embedded.quantized.weights import install
from miles_formats import FormatCodec, Products, emulate_product, reference_only
from miles_fp8.format import Fp8
from miles_fp8.layout import CODES, SCALES, TILE
from miles_fp8.product import Fp8Product, scale_rows
from miles_testing import hard_cases, tiny_checkpoint

hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a GPU of sm_90"
    ),
]


def product(format=None):
    return (format or Fp8()).product(torch.device("cuda"), torch.bfloat16)


def freed_parameters(model):
    return [p for p in model.parameters() if codes_of(p) is not None]


async def ask(engine):
    """Tokens and log-probabilities of 20 requests."""
    requests = [Request([5, 6, 7 + i], Sampling(12), key=i) for i in range(20)]
    return [(r.tokens, r.log_probs) for r in await asyncio.gather(*map(engine.generate, requests))]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(4, 256), (3, 200), (1, 5), (0, 128)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_codes_of_an_activation_are_those_of_its_blocks_one_by_one(shape, power_of_two):
    x = normal(*shape) * 3
    codes, scales = Fp8(power_of_two).quantize_activation(x)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape and len(scales) == len(x)
    for row in range(shape[0]):
        for block, piece in enumerate(x[row].split(TILE)):
            scale = max(float(piece.abs().max()), 1e-10) / 448
            scale = 2.0 ** math.ceil(math.log2(scale)) if power_of_two else scale
            assert float(scales[row, block]) == pytest.approx(scale, rel=1e-6)
            expected = (piece / scales[row, block]).to(torch.float8_e4m3fn)
            assert torch.equal(codes[row].split(TILE)[block].float(), expected.float())


def test_codes_and_scales_mean_what_the_emulation_multiplies():
    x = normal(6, 300).bfloat16()
    codes, scales = Fp8().quantize_activation(x)
    means = codes.float() * scales.repeat_interleave(TILE, 1)[:, :300]
    assert torch.equal(means.bfloat16(), Fp8().fake_quantize_activation(x))


@pytest.mark.parametrize(("tiles", "stored"), [((3, 5), (3, 8)), ((2, 4), (2, 4)), ((1, 1), (1, 4))])
def test_a_weights_scales_lie_in_rows_of_sixteen_bytes(tiles, stored):
    scales = torch.rand(tiles)
    found = scale_rows(scales)
    assert found.shape == stored and found.is_contiguous()
    assert torch.equal(found[:, : tiles[1]], scales) and not found[:, tiles[1] :].any()
    assert found.t().stride() == (1, stored[1])  # what cuBLAS is given


@pytest.mark.parametrize(
    ("shape", "taken"), [((16, 16), True), ((4096, 14336), True), ((8, 128), False), ((16, 24), False)]
)
def test_which_weights_it_takes(shape, taken):
    assert Fp8Product.takes(object.__new__(Fp8Product), shape) is taken


class TestOnTheGpu:
    pytestmark = hopper

    @pytest.mark.parametrize("power_of_two", [False, True])
    def test_the_kernels_codes_are_the_references(self, power_of_two):
        format = Fp8(power_of_two)
        for name, matrix in hard_cases(256, 512, (TILE, TILE)):
            x = matrix.cuda()
            found = format.quantize_activation(x)
            with reference_only():
                expected = format.quantize_activation(x)
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), name

    def test_padding_is_zeros_and_what_is_not_finite_shows(self):
        from miles_fp8 import kernels

        x = normal(5, 200).cuda()
        x[1, 3], x[2, 150] = float("nan"), float("inf")
        codes, scales = kernels.activation_codes(x, False)
        assert codes.shape == (8, 200) and scales.shape == (8, 2) and scales.stride() == (1, 8)
        assert not codes[5:].float().any() and bool(scales[5:].isfinite().all())
        y = product()(x.bfloat16()[:, :192], product().prepare(Fp8().quantize(normal(32, 192).cuda())))
        assert y.shape == (5, 32) and y.isnan().any(1).tolist() == [False, True, True, False, False]

    @pytest.mark.parametrize("power_of_two", [False, True])
    @pytest.mark.parametrize("shape", [(1, 128, 128), (37, 384, 640), (256, 144, 1040), (5, 16, 16), (130, 512, 4096)])
    def test_it_is_nearer_to_the_exact_product_than_the_emulation(self, shape, power_of_two):
        rows, n, k = shape
        format = Fp8(power_of_two)
        x, weight = normal(rows, k).bfloat16().cuda(), format.quantize(normal(n, k, seed=1).cuda())
        found = product(format)(x, product(format).prepare(weight))
        exact = format.fake_quantize_activation(x.float()).double() @ format.dequantize(weight).double().T
        distance = float((found - exact).norm() / exact.norm())
        assert distance < 0.0022  # rounding to BF16 is .0017
        if found.numel() > 10_000 and not power_of_two:  # BF16 holds code times a power of two exactly
            assert distance < float((emulate_product(format, x, weight) - exact).norm() / exact.norm())

    def test_partial_sums_are_promoted(self):
        x, weight = normal(64, 16384).abs().bfloat16().cuda(), Fp8().quantize(normal(128, 16384, seed=1).abs().cuda())
        found = product()(x, product().prepare(weight))
        exact = Fp8().fake_quantize_activation(x.float()).double() @ Fp8().dequantize(weight).double().T
        assert abs(float(((found - exact) / exact).mean())) < 0.0015

    @pytest.mark.parametrize(("n", "k"), [(256, 512), (1536, 4096), (144, 1040)])
    def test_a_row_does_not_depend_on_the_number_of_rows_in_a_fixed_order(self, n, k):
        fixed = product(Fp8(fixed_order=True))
        weight = fixed.prepare(Fp8().quantize(normal(n, k, seed=1).cuda()))
        x = normal(5000, k).bfloat16().cuda()
        whole = fixed(x, weight)
        assert float((whole - product()(x, weight)).norm() / whole.norm()) < 0.003
        for first, rows in ((0, 1), (1, 2), (3, 16), (64, 65), (5, 255), (200, 4100)):
            piece = slice(first, first + rows)
            assert torch.equal(fixed(x[piece].contiguous(), weight), whole[piece])

    def test_experts_do_not_depend_on_the_number_of_rows_in_a_fixed_order(self):
        fixed, k, inner, count = product(Fp8(fixed_order=True)), 256, 128, 4
        parts = [
            [Fp8().quantize(normal(*s, seed=i + j).cuda()) for i in range(count)]
            for j, s in enumerate(((2 * inner, k), (k, inner)))
        ]
        weights = [{name: torch.stack([p[name] for p in each]) for name in (CODES, SCALES)} for each in parts]
        x = normal(3000, k).bfloat16().cuda()
        owner = (torch.arange(3000, device="cuda") * count) // 3000

        def compute(rows):
            ends = torch.bincount(owner[rows], minlength=count).cumsum(0).int()
            return fixed.experts(x[rows].contiguous(), torch.arange(len(rows), device="cuda"), ends, *weights)

        whole = compute(torch.arange(3000, device="cuda"))
        for step in (1, 7, 300):
            rows = torch.arange(0, 3000, step, device="cuda")
            assert torch.equal(compute(rows), whole[rows])

    def test_a_row_does_not_depend_on_the_others(self):
        weight = product().prepare(Fp8().quantize(normal(256, 512, seed=1).cuda()))
        x = normal(64, 512).bfloat16().cuda()
        other = x.clone()
        other[1:] *= 1000
        torch.testing.assert_close(product()(x, weight)[0], product()(other, weight)[0], rtol=0, atol=0)

    @pytest.mark.parametrize("rows", [1, 16, 17, 64, 200, 600])
    @pytest.mark.parametrize("shape", [(1536, 1536), (256, 4096), (24, 256)])
    def test_every_kernel_is_near_the_exact_product_and_repeats_itself(self, rows, shape):
        n, k = shape
        x, weight = normal(rows, k).bfloat16().cuda(), Fp8().quantize(normal(n, k, seed=1).cuda())
        bias = normal(n, seed=2).bfloat16().cuda()
        multiply = product()
        prepared = multiply.prepare(weight)
        if not multiply.takes(shape):
            prepared = multiply.prepare(Fp8().quantize(normal(32, k, seed=1).cuda()))
            bias, weight = bias.new_zeros(32), Fp8().quantize(normal(32, k, seed=1).cuda())
        found = multiply(x, prepared, bias)
        exact = Fp8().fake_quantize_activation(x.float()).double() @ Fp8().dequantize(weight).double().T + bias.double()
        assert float((found - exact).norm() / exact.norm()) < 0.0022
        for _ in range(20):  # programs that share a product add in a fixed order
            assert torch.equal(multiply(x, prepared, bias), found)
        assert not multiply.tickets.any()

    def test_layers_that_read_one_input_are_columns_of_one_product(self):
        x, parts = normal(5, 512).bfloat16().cuda(), [Fp8().quantize(normal(n, 512, seed=n).cuda()) for n in (256, 128)]
        multiply = product()
        prepared = [multiply.prepare(part) for part in parts]
        joint = {name: torch.cat([p[name].t() for p in prepared]).t() for name in prepared[0]}
        exact = [Fp8().fake_quantize_activation(x.float()).double() @ Fp8().dequantize(p).double().T for p in parts]
        for found, expected in zip(multiply(x, joint).split([256, 128], 1), exact, strict=True):
            assert float((found - expected).norm() / expected.norm()) < 0.0022

    @pytest.mark.parametrize("rows", [1, 40, 900])
    def test_experts_are_near_their_exact_products(self, rows):
        experts, dim, inner, k = 8, 256, 128, 2
        up, down = (
            {CODES: torch.stack([p[CODES] for p in parts]), SCALES: torch.stack([p[SCALES] for p in parts])}
            for parts in (
                [Fp8().quantize(normal(2 * inner, dim, seed=e).cuda()) for e in range(experts)],
                [Fp8().quantize(normal(dim, inner, seed=90 + e).cuda()) for e in range(experts)],
            )
        )
        index = torch.rand(rows, experts, generator=torch.Generator().manual_seed(3)).topk(k).indices.cuda()
        index[:, 0] = torch.where(index[:, 0] == 5, index[:, 0] * 0 + 1, index[:, 0])  # some expert gets few rows
        flat, order = index.flatten().sort(stable=True)
        row = order // k
        ends = torch.bincount(flat, minlength=experts).cumsum(0).int()
        x = normal(rows, dim).bfloat16().cuda()
        found = product().experts(x, row, ends, up, down)

        def values(parts, e):
            return Fp8().dequantize({CODES: parts[CODES][e], SCALES: parts[SCALES][e]}).double()

        rounded = Fp8().fake_quantize_activation(x.float()).double()
        exact = torch.empty(len(row), dim, dtype=torch.float64, device="cuda")
        for e in range(experts):
            mine = flat == e
            gate, value = (rounded[row[mine]] @ values(up, e).T).bfloat16().chunk(2, -1)
            middle = (torch.nn.functional.silu(gate.float()).bfloat16().float() * value.float()).bfloat16()
            exact[mine] = Fp8().fake_quantize_activation(middle.float()).double() @ values(down, e).T
        # a value of the middle that is rounded otherwise may get the neighbouring code
        assert float((found - exact).norm() / exact.norm()) < 0.01

    @pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
    def test_an_engine_holds_codes_only_and_answers_as_with_decoded_weights(self, tmp_path, family):
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 512, "head_dim": 64}
        path = tiny_checkpoint(family, tmp_path, num_hidden_layers=4, **sizes)
        codec, trainer = FormatCodec(Fp8()), load_model(path, "bfloat16", "cuda")

        def measure(codes_only):
            """Return bytes that an update adds, answers after two updates, emulated scores, and the number of freed weights."""
            model = load_model(path, "bfloat16", "cuda")
            engine = EmbeddedEngine(model, Settings(str, codec=codec, products=Products("native")))
            if not codes_only:
                engine._weights.inputs = RoundedInputs(model, codec, engine._weights.inputs.product)
            before, added, answers = torch.cuda.memory_allocated(), 0, []
            for version in (0, 1):  # the second update replaces codes under recorded graphs
                asyncio.run(engine.update_weights(codec.encode(export(trainer)), version))
                added = added or torch.cuda.memory_allocated() - before
                answers.append(asyncio.run(ask(engine)))
            with engine.emulated_products():
                (score,) = asyncio.run(engine.score([[3, 1, 4, 1, 5]]))
            return added, answers, score, sum(p.numel() for p in freed_parameters(model))

        more, expected, near, none = measure(False)
        gc.collect()
        less, found, score, count = measure(True)
        assert found == expected and none == 0 and count > 1_000_000
        # codes next to values: one byte more per weight; codes instead of values: one byte less
        assert more > 0.95 * count and less < -0.9 * count
        assert abs(score - near).max() < 0.1

    def test_emulated_training_of_experts_agrees_with_torch_operations(self, tmp_path):
        sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
        path, found = tiny_checkpoint("qwen3_moe", tmp_path, **sizes), []
        for table in (None, TORCH):
            model = load_model(path, "bfloat16", "cuda")
            if table is not None:
                use_operations(model, table)
            quantizer = install(model, FormatCodec(Fp8()))
            block, x = model.model.layers[1].mlp, normal(1, 70, 256).bfloat16().cuda().requires_grad_()
            y = block(x)
            y.backward(normal(1, 70, 256, seed=2).bfloat16().cuda())
            experts = block.experts
            found.append((y.detach(), x.grad, experts.gate_up_proj.grad, experts.down_proj.grad))
            with torch.no_grad():  # all weights at once, with the codes of one at a time
                experts.down_proj.mul_(1.5)
            fresh = install(load_model(path, "bfloat16", "cuda"), FormatCodec(Fp8()))
            fresh.parameter("model.layers.1.mlp.experts.down_proj").data.mul_(1.5)
            names = [source for source in quantizer.sources if "layers.1.mlp" in source]
            assert names and all(torch.equal(quantizer.value(s), fresh.value(s)) for s in names)
        for ours, theirs in zip(*found, strict=True):
            assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.02

    @pytest.mark.parametrize("rows", [5, 64, 512, 1000])
    def test_gradients_are_multiplied_by_the_transposed_codes(self, rows):
        product, weight = Fp8Product(torch.device("cuda"), torch.bfloat16), normal(384, 256, seed=3).bfloat16().cuda()
        stored = Fp8().quantize(weight)
        gradient = normal(rows, 384, seed=4).bfloat16().cuda()
        found = product(gradient, product.transpose(stored)).double()
        exact = Fp8().fake_quantize_activation(gradient.float()).double() @ Fp8().dequantize(stored).double()
        assert float((found - exact).norm() / exact.norm()) < 0.004

    def test_rows_that_are_kept_give_the_same_products(self):
        product, weight = Fp8Product(torch.device("cuda"), torch.bfloat16), normal(256, 256, seed=5).bfloat16().cuda()
        codes, x = product.prepare(Fp8().quantize(weight)), normal(1000, 256, seed=6).bfloat16().cuda()
        expected = product(x, codes)
        product.keep_rows(x, 2)
        assert all(torch.equal(product(x, codes), expected) for _ in range(3))

    def test_engine_and_trainer_of_a_model_multiply_codes_and_agree(self, tmp_path):
        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        path = tiny_checkpoint("qwen3", tmp_path, **sizes)
        codec, products = FormatCodec(Fp8()), Products("native")
        trainer, engine_model = (load_model(path, "bfloat16", "cuda") for _ in range(2))
        engine = EmbeddedEngine(engine_model, Settings(str, codec=codec, products=products))
        quantizer = engine.quantizer(codec.format)
        assert check_product("engine", codec.format, quantizer.product, quantizer.shapes) > 0
        fake = install(trainer, codec, products.of(codec.format, trainer))
        asyncio.run(engine.update_weights(codec.encode(export(trainer)), 0))
        assert engine.native_products and len(fake.inputs.layers) == 2 * 7
        x = normal(33, 256).bfloat16().cuda()
        for name in fake.inputs.layers:
            ours, theirs = (m.get_submodule(name.removesuffix(".weight")) for m in (engine_model, trainer))
            wide = x if ours.in_features == 256 else x.repeat(1, 2)
            with torch.no_grad():
                found = ours(wide)
                assert torch.equal(found, theirs(wide)), name
                with engine.emulated_products():
                    near = ours(wide)
            assert 0 < float((found - near).float().norm() / near.float().norm()) < 0.006
