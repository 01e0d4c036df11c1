"""What an adapter of a linear layer computes, and with how much work."""

import pytest
import torch

from miles_embedded.model.load import load_model
from miles_embedded.model.views import export
from miles_lora import LoraOptions
from miles_lora.adapter import Adapter, attach
from miles_lora.hooks import Trained, merge
from miles_lora.targets import find_targets
from miles_testing import tiny_checkpoint


@pytest.mark.parametrize("alpha", [3.0, 8.0])
def test_the_result_is_scaled_before_it_is_widened(alpha):
    adapter = Adapter(torch.empty(40, 24), LoraOptions(rank=4, alpha=alpha))
    torch.nn.init.normal_(adapter.lora_A)
    torch.nn.init.normal_(adapter.lora_B)
    x = torch.randn(1, 5, 24)
    with torch.profiler.profile(record_shapes=True) as profiler:
        found = adapter(x)
    torch.testing.assert_close(found, alpha / 4 * (x @ adapter.lora_A.t() @ adapter.lora_B.t()), rtol=1e-5, atol=1e-5)
    assert not [event for event in profiler.events() if event.name == "aten::mul" and 40 in event.input_shapes[0]]


def test_a_merged_stream_reads_the_names_of_the_parameters_once(tmp_path, monkeypatch):
    model, options = load_model(tiny_checkpoint("qwen3", tmp_path)), LoraOptions(rank=2)
    targets = find_targets(model, ["all-linear"])
    adapters = attach(targets, options, "0", raw_inputs=False)
    calls, own = [], type(model).state_dict
    monkeypatch.setattr(type(model), "state_dict", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    names = [name for unit in merge(Trained(model, targets, adapters, options), export(model)) for name in unit.tensors]
    assert len(adapters) == 14 and len(calls) < 6 and "model.layers.1.mlp.down_proj.weight" in names
