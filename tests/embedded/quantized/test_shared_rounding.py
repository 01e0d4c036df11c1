"""Emulated layers that read one input round it once."""

import copy

import pytest
import torch

from miles_embedded.model.load import load_model
from miles_embedded.quantized.activation import RoundedInputs
from miles_embedded.quantized.weights import install
from miles_formats.codec import FormatCodec
from miles_fp8.format import Fp8
from miles_testing.tiny import tiny_checkpoint


class Counting(Fp8):
    calls = 0

    def fake_quantize_activation(self, x):
        Counting.calls += 1
        return super().fake_quantize_activation(x)


@pytest.fixture
def model(tmp_path):
    Counting.calls = 0
    return load_model(tiny_checkpoint("qwen3", tmp_path, hidden_size=128, intermediate_size=256), "float32")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_layers_round_a_common_input_once_and_others_their_own(model):
    inputs = RoundedInputs(model, FormatCodec(Counting()))
    layer, x = model.model.layers[0], normal(1, 5, 128)
    attention = layer.self_attn
    seen = []
    for one in (attention.q_proj, attention.k_proj, attention.v_proj):
        one.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        one(x)
    assert Counting.calls == 1 and seen[0] is seen[1] is seen[2] and not torch.equal(seen[0], x)
    attention.k_proj(x)  # the rounding was read already
    attention.q_proj(x)
    attention.k_proj(x.clone())
    assert Counting.calls == 4
    layer.mlp.gate_proj(x), layer.mlp.up_proj(x), layer.mlp.down_proj(normal(1, 5, 256))
    assert Counting.calls == 6
    inputs.enabled = False
    attention.q_proj(x)
    attention.k_proj(x)
    assert Counting.calls == 6 and seen[-1] is x
    inputs.remove()
    attention.q_proj(x)
    assert Counting.calls == 6


def test_gradients_are_those_of_separate_roundings(model):
    other, found = copy.deepcopy(model), []
    for one, shared in ((model, True), (other, False)):
        quantizer = install(one, FormatCodec(Fp8()))
        assert sum(s is not None for s in quantizer.inputs._emulated.values()) == 2 * 5
        if not shared:
            quantizer.inputs._emulated = {}
        x = normal(1, 6, 128).requires_grad_()
        mlp = one.model.layers[1].mlp
        y = mlp(x)
        y.backward(normal(1, 6, 128, seed=2))
        found.append((y, x.grad, mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad, mlp.down_proj.weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
