"""What a plugin does to a module's class takes effect, whatever forward the backend has put on the module."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from miles_embedded.engine.runner import Runner
from miles_embedded.model import onednn
from miles_embedded.model.growing_rope import follow_rows
from miles_embedded.model.load import load_model, unloaded_model
from miles_embedded.model.parts import backbone, put_forward
from miles_testing import tiny_checkpoint


class Doubled(nn.Linear):
    """A linear layer whose output is twice as large."""

    def forward(self, input):
        """As the class it comes from, times two."""
        return 2 * super().forward(input)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("fast", [True, False])
def test_a_linear_layer_of_another_class_computes_as_that_class(monkeypatch, fast, rows):
    """On every processor: those with a faster library put a forward on each linear layer."""
    monkeypatch.setattr(onednn, "mkl_is_slow", lambda: fast)
    monkeypatch.setattr(onednn, "available", lambda: False)
    model = nn.Sequential(nn.Linear(256, 256))
    onednn.use_fast_linear(model)
    assert ("forward" in vars(model[0])) is fast
    x = torch.randn(rows, 256)
    with torch.no_grad():
        before = model(x)
        model[0].__class__ = Doubled
        torch.testing.assert_close(model(x), 2 * before, rtol=1e-4, atol=1e-4)
        seen = []
        model[0].register_forward_hook(lambda module, args, output: seen.append(output) or output + 1)
        torch.testing.assert_close(model(x), 2 * before + 1, rtol=1e-4, atol=1e-4)
    assert len(seen) == 1


def test_a_swapped_layer_changes_what_the_whole_model_says(tmp_path, monkeypatch):
    monkeypatch.setattr(onednn, "mkl_is_slow", lambda: True)
    model = load_model(tiny_checkpoint("qwen3", tmp_path / "model"), "float32")
    runner, sequence = Runner(model), list(range(3, 50))
    before = runner.score([sequence], 0.5)[0]  # a temperature of 1/2 doubles logits, and so does the layer
    model.lm_head.__class__ = Doubled
    np.testing.assert_allclose(runner.score([sequence], 1.0)[0], before, atol=1e-5)


def test_a_subclass_that_keeps_the_forward_keeps_ours():
    layer = nn.Linear(4, 4)
    put_forward(layer, lambda module, x: x + 1)
    assert torch.equal(layer(torch.zeros(1, 4)), torch.ones(1, 4))
    layer.__class__ = type("FSDPLinear", (nn.Linear,), {})
    assert torch.equal(copy.deepcopy(layer)(torch.zeros(1, 4)), torch.ones(1, 4))


def test_a_rotary_embedding_of_another_class_computes_as_that_class():
    from transformers import LlamaConfig

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                         max_position_embeddings=16, rope_parameters=rope)  # fmt: skip
    rotary = backbone(unloaded_model(config, torch.float32, torch.device("cpu"))).rotary_emb
    follow_rows(rotary)
    rotary.__class__ = type("Still", (type(rotary),), {"forward": lambda self, x, position_ids: (x * 0, x * 0)})
    cos, _ = rotary(torch.ones(1, 3, 8), torch.arange(3)[None])
    assert not cos.any()
