"""The product of MXFP8 codes. It needs a GPU that nobody here has; what any machine can tell is tested."""

import pytest
import torch

from miles_formats import NoProduct, scaled_mm
from miles_mxfp8.format import Mxfp8
from miles_mxfp8.layout import CODES, SCALES
from miles_mxfp8.product import Mxfp8Product, swizzled


@pytest.fixture
def blackwell(monkeypatch):
    capability = [(10, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(scaled_mm, "has_triton", lambda: True)
    return capability


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (1, 1), (200, 7), (130, 4)])
def test_scales_lie_where_cublas_reads_them(shape):
    rows, blocks = shape
    scales = torch.randint(0, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found, across = swizzled(scales).tolist(), -(-blocks // 4)
    assert len(found) == -(-rows // 128) * 128 * across * 4
    seen = set()
    for row in range(rows):
        for block in range(blocks):
            tile = (row // 128) * across + block // 4
            place = 512 * tile + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
            assert found[place] == scales[row, block], (row, block)
            seen.add(place)
    assert len(seen) == rows * blocks and not any(v for i, v in enumerate(found) if i not in seen)


def test_the_order_is_torchaos():
    mx = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scales = torch.randint(0, 255, (300, 24), dtype=torch.uint8)
    assert torch.equal(swizzled(scales), mx.to_blocked(scales))


def test_the_capability_decides(blackwell):
    device = torch.device("cuda", 0)
    product = Mxfp8().product(device, torch.bfloat16)
    assert product.takes((64, 96)) and not product.takes((40, 96))
    blackwell[0] = (9, 0)
    with pytest.raises(NoProduct, match="it needs sm_100 or later, and this GPU is sm_90"):
        Mxfp8().product(device, torch.bfloat16)


def test_what_torch_is_handed(blackwell, monkeypatch):
    """The kernel is replaced by the reference and torch's product by one that puts the operands together again."""
    import sys
    import types

    format, handed = Mxfp8(), {}

    def quantize(x, codes, scales):
        parts = format.quantize(x)
        codes.copy_(parts[CODES])
        scales.copy_(parts[SCALES])

    def product(a, b, scale_a, kind_a, scale_b, kind_b, **more):
        handed.update(more, kinds=(kind_a, kind_b))
        values = []
        for codes, scales in ((a, scale_a), (b.t(), scale_b)):
            rows, blocks = codes.shape[0], codes.shape[1] // 32
            assert scales.dtype == torch.float8_e8m0fnu and scales.is_contiguous()
            tiles = scales.view(torch.uint8).view(-(-rows // 128), -(-blocks // 4), 32, 4, 4)
            bytes = tiles.permute(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)[:rows, :blocks]
            values.append(codes.float() * torch.exp2(bytes.float() - 127).repeat_interleave(32, 1))
        return (values[0] @ values[1].T).to(more["output_dtype"])

    kernels = types.SimpleNamespace(quantize=quantize)
    monkeypatch.setitem(sys.modules, "miles_mxfp8.kernels", kernels)
    monkeypatch.setattr("miles_mxfp8.kernels", kernels, raising=False)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", product)
    made = Mxfp8Product(torch.device("cuda", 0), torch.bfloat16)
    x, weight = torch.randn(5, 160).bfloat16(), format.quantize(torch.randn(144, 160))
    expected = format.fake_quantize_activation(x.float()) @ format.dequantize(weight).T
    torch.testing.assert_close(made(x, made.prepare(weight)), expected.bfloat16())
    functional = torch.nn.functional
    assert handed["swizzle_a"] == handed["swizzle_b"] == functional.SwizzleType.SWIZZLE_32_4_4
    assert handed["kinds"] == (functional.ScalingType.BlockWise1x32,) * 2
