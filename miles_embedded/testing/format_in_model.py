"""Contract tests of a number format inside models: ``FormatContract``, and equal values in the embedded engine and trainer.

class TestMyFormat(FormatInModelContract):
    def make(self):
        return MyFormat()
"""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import Tensor, nn

from miles_embedded.model.load import load_model
from miles_embedded.model.views import Loader, export, views
from miles_embedded.quantized.weights import FakeQuantizer, install
from miles_formats.codec import FormatCodec
from miles_testing.format_contract import FormatContract, assert_same, normal, suffixes
from miles_testing.tiny import tiny_checkpoint


class FormatInModelContract(FormatContract):
    """Subclass it and implement ``make``; override the attributes of ``FormatContract`` as needed."""

    def test_engine_and_trainer_compute_with_the_same_numbers(self) -> None:
        format = self.make()
        trainer, engine = tiny_model(), tiny_model()
        codec = FormatCodec(format)
        quantizer = install(trainer, codec)
        loader, stored = Loader(engine), 0
        for encoded in codec.encode(export(trainer)):
            plain = original(trainer, encoded.name)
            if encoded.format:
                stored += 1
                if not format.couple:
                    assert_same(suffixes(encoded.parts), format.quantize(plain.bfloat16()))
            else:
                assert torch.equal(encoded.parts[encoded.name], plain)
            loader.put(encoded.name, codec.decode(encoded))
        assert stored > 0
        engine_side = dict(engine.named_parameters())
        for source in quantizer.sources:
            assert torch.equal(quantizer.value(source), engine_side[source]), source

    def test_the_gradient_is_the_weights_own(self) -> None:
        format, trainer = self.make(), tiny_model()
        quantizer = install(trainer, FormatCodec(format))
        source, module = find_linear(trainer, quantizer)
        hidden = normal(4, module.in_features).requires_grad_()
        module(hidden).square().sum().backward()
        copy = quantizer.value(source).clone().requires_grad_()
        read = format.fake_quantize_activation(hidden.detach()).requires_grad_()
        nn.functional.linear(read, copy, module.bias).square().sum().backward()
        found, expected = (module.weight.grad, hidden.grad), (copy.grad, read.grad)
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert not torch.equal(module.weight, quantizer.value(source)), "the parameter itself must not change"


def tiny_model() -> nn.Module:
    """Make a mixture-of-experts model with one dense layer, whose matrices are divisible by all usual tiles."""
    with tempfile.TemporaryDirectory() as directory:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
        tiny_checkpoint("qwen3_moe", directory, **sizes, mlp_only_layers=[1])
        return load_model(directory, "float32")


def original(model: nn.Module, name: str) -> Tensor:
    """Return a checkpoint tensor of the model."""
    view = next(v for v in views(model) if v.name == name)
    return view.of(dict(model.state_dict(keep_vars=True))[view.source].detach())


def find_linear(model: nn.Module, quantizer: FakeQuantizer) -> tuple[str, nn.Linear]:
    """Return the name and module of a quantised linear layer; skips the test if the format quantises only experts."""
    for source in quantizer.sources:
        module = model.get_submodule(source.rpartition(".")[0])
        if isinstance(module, nn.Linear):
            return source, module
    pytest.skip("the format does not quantise linear layers")
