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


def random_adapter(alpha=3.0, dtype=torch.float32):
    adapter = Adapter(torch.empty(40, 24, dtype=dtype), LoraOptions(rank=4, alpha=alpha))
    torch.nn.init.normal_(adapter.lora_A)
    torch.nn.init.normal_(adapter.lora_B)
    return adapter


@pytest.mark.parametrize("alpha", [3.0, 8.0])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("shape", [(1, 5), (2, 3), (5, 1), (4,)])
def test_the_scaled_product_is_added_to_the_output(alpha, gradients, shape):
    adapter, x, base = random_adapter(alpha), torch.randn(*shape, 24), torch.randn(*shape, 40)
    expected = base + alpha / 4 * (x @ adapter.lora_A.t() @ adapter.lora_B.t())
    with torch.set_grad_enabled(gradients), torch.profiler.profile(record_shapes=True) as profiler:
        found = adapter(base.clone(), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    wide = [event.name for event in profiler.events() if event.name in ("aten::mul", "aten::add")]
    assert not wide if shape == (1, 5) or not gradients else wide == ["aten::add"]


def test_a_part_of_the_columns_of_a_joint_product_is_not_left_as_it_was():
    adapter, x, joint = random_adapter(), torch.randn(1, 5, 24), torch.randn(1, 5, 60)
    first, second = joint.clone().split([40, 20], -1)
    with torch.no_grad():
        found = adapter(first, x)
    torch.testing.assert_close(found, joint[..., :40] + 0.75 * (x @ adapter.lora_A.t() @ adapter.lora_B.t()))
    assert torch.equal(second, joint[..., 40:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(1, 6), (2, 3)])
def test_gradients_are_those_of_separate_operations(dtype, rows):
    layer, adapter = torch.nn.Linear(24, 40, bias=False, dtype=dtype), random_adapter(dtype=dtype)
    x, weights = torch.randn(*rows, 24, dtype=dtype), torch.randn(*rows, 40, dtype=dtype)

    def gradients(add):
        inputs = [x.clone().requires_grad_(), *adapter.parameters()]
        return torch.autograd.grad((add(layer(inputs[0]), inputs[0]) * weights).sum(), inputs)

    expected = gradients(
        lambda base, x: base + 0.75 * torch.nn.functional.linear(x @ adapter.lora_A.t(), adapter.lora_B)
    )
    close = {"rtol": 0.05, "atol": 0.2} if dtype == torch.bfloat16 else {}
    for found, reference in zip(gradients(adapter), expected, strict=True):
        torch.testing.assert_close(found, reference, **close)


def test_a_merged_stream_reads_the_names_of_the_parameters_once(tmp_path, monkeypatch):
    model, options = load_model(tiny_checkpoint("qwen3", tmp_path)), LoraOptions(rank=2)
    targets = find_targets(model, ["all-linear"])
    adapters = attach(targets, options, "0", raw_inputs=False)
    calls, own = [], type(model).state_dict
    monkeypatch.setattr(type(model), "state_dict", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    names = [name for unit in merge(Trained(model, targets, adapters, options), export(model)) for name in unit.tensors]
    assert len(adapters) == 14 and len(calls) < 6 and "model.layers.1.mlp.down_proj.weight" in names
