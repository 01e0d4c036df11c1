"""Modules whose kernels write the codes of the rows that native products read: which rows, and when not. A double records them on a CPU."""

import copy
from dataclasses import replace

import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_embedded.model.load import load_model
from miles_embedded.model.load_units import load_units
from miles_embedded.model.operations import operations_of, use_operations
from miles_embedded.model.row_readers import find_epilogue
from miles_embedded.model.views import export
from miles_embedded.quantized.activation import RoundedInputs
from miles_formats.codec import FormatCodec
from miles_fp8.format import Fp8
from miles_testing.doubles.product import SIZES, ExactExperts
from miles_testing.tiny import tiny_checkpoint

FORMAT = Fp8()


class Epilogue:
    """Adds the rows that it receives to ``rows``."""

    def __init__(self, rows):
        self.rows = rows

    def finish(self, rows):
        self.rows.append(rows)


class Recorder(ExactExperts):
    """Records written rows, and of every product the place of its input among them; None if it is none of them."""

    def __init__(self):
        super().__init__(FORMAT, torch.device("cpu"), torch.float32)
        self.written, self.read, self.requests = [], [], []

    def __deepcopy__(self, memo):
        return Recorder()

    def row_epilogue(self, shape, uses=1):
        self.requests.append((shape, uses))
        return Epilogue(self.written)

    def find(self, x):
        places = [i for i, rows in enumerate(self.written) if rows.data_ptr() == x.data_ptr()]
        self.read.append(places[0] if places else None)

    def __call__(self, x, weight, bias=None):
        self.find(x)
        return super().__call__(x, weight, bias)

    def experts(self, x, *others):
        self.find(x)
        return super().experts(x, *others)


def norm(x, weight, eps, epilogue=None):
    wide = x.float()
    found = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    if epilogue is not None:
        epilogue.finish(found)
    return found


def gate(a, b, epilogue=None):
    found = torch.nn.functional.silu(a) * b
    if epilogue is not None:
        epilogue.finish(found)
    return found


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def loaded(request, tmp_path):
    model = load_model(tiny_checkpoint(request.param, tmp_path, **SIZES), "float32")
    use_operations(model, replace(operations_of(model), norm=norm, gate=gate))
    codec, product = FormatCodec(FORMAT), Recorder()
    inputs = RoundedInputs(model, codec, product)
    load_units(model, inputs.take_each(codec.encode(export(model))), codec.decode)
    return model, inputs, product


def run(model, product):
    """Run one layer's block behind its norm, and its attention's products; returns the MLP's result."""
    product.written.clear()
    product.read.clear()
    product.requests.clear()
    layer, x = model.model.layers[1], torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(0))
    rows = layer.input_layernorm(x)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, name)(rows)
    return layer.mlp(layer.post_attention_layernorm(x))


@torch.no_grad()
def test_rows_of_norms_and_gates_are_written_for_the_products_that_read_them(loaded):
    model, _, product = loaded
    run(model, product)
    layer = model.model.layers[1]
    if hasattr(layer.mlp, "experts"):
        assert product.read == [0, 1] and product.requests == [((5, 128), 1), ((5, 128), 1)]
    else:
        assert product.read == [0, 1, 2]
        assert product.requests == [((5, 128), 1), ((5, 128), 1), ((5, 256), 1)]
    assert find_epilogue(layer.self_attn, (5, 128), torch.float32) is not None  # for its output projection
    assert find_epilogue(layer.self_attn, (0, 128), torch.float32) is None
    assert find_epilogue(layer.self_attn, (5, 128), torch.bfloat16) is None
    assert find_epilogue(model.model.norm, (5, 128), torch.float32) is None


def test_nothing_is_written_where_no_native_product_reads_it(loaded):
    model, inputs, product = loaded
    run(model, product)  # with gradients
    assert not product.requests
    with torch.no_grad():
        with inputs.emulate():
            run(model, product)
        inputs.enabled = False
        run(model, product)
        inputs.enabled = True
        assert not product.requests
        run(model, product)
        assert product.requests
        inputs.drop_all()
        run(model, product)
        assert not product.requests
        inputs.remove()
        assert find_epilogue(model.model.layers[1].input_layernorm, (5, 128), torch.float32) is None
        again = Recorder()  # another precision
        codec = FormatCodec(FORMAT)
        inputs = RoundedInputs(model, codec, again)
        load_units(model, inputs.take_each(codec.encode(export(model))), codec.decode)
        run(model, again)
        assert again.requests and not product.requests


@torch.no_grad()
def test_a_copy_of_a_model_writes_for_its_own_product(loaded):
    model, _, product = loaded
    expected = run(model, product)
    count = len(product.requests)
    other = copy.deepcopy(model)
    copied = other.model.layers[1].self_attn.q_proj.forward.product
    assert copied is not product
    assert torch.equal(run(other, copied), expected)
    assert len(copied.requests) == count and len(product.requests) == count


@torch.no_grad()
def test_a_hook_in_front_of_a_product_gives_it_other_rows(loaded):
    model, _, product = loaded
    run(model, product)
    layer = model.model.layers[1]
    block = layer.mlp.experts if hasattr(layer.mlp, "experts") else layer.mlp.down_proj
    handle = block.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    run(model, product)
    handle.remove()
    assert product.written and product.read[-1] is None


@torch.no_grad()
def test_layers_without_a_joint_product_each_read_the_codes(loaded):
    model, inputs, product = loaded
    name = "model.layers.1.self_attn.k_proj.weight"
    q, v = (inputs.layers[name.replace("k_proj", n)] for n in ("q_proj", "v_proj"))
    for layer in (q, inputs.layers[name], v):
        layer.joint = None
    run(model, product)
    assert product.read[:3] == [0, 0, 0] and product.requests[0][1] == 3
    inputs.take(Encoded(name, {name: inputs.layers[name].module.weight}))  # plain: not all layers read codes
    run(model, product)
    assert product.requests[0] != ((5, 128), 3)
