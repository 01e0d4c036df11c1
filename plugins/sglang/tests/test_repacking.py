"""INT4 layers that SGLang packs after it loaded them, on doubles of its classes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from miles_sglang import repacking
from miles_sglang.buckets import Bucket
from miles_sglang.loader import COMPLETE, load, unwritten_parameters


class Loaded(nn.Parameter):
    """A parameter of the loaded form, which has a property instead of an attribute for its loader."""

    def __new__(cls, data: Tensor, loader: Any) -> Loaded:
        made = super().__new__(cls, data, requires_grad=False)
        made._weight_loader = loader
        made.rows = 0
        return made

    @property
    def weight_loader(self) -> Any:
        return self._weight_loader


class CompressedTensorsWNA16:
    """Replaces the parameters of a layer by packed ones of another class and shape."""

    def process_weights_after_loading(self, layer: Any) -> None:
        self.workspace = torch.ones(2)
        codes, scales = layer.weight_packed, layer.weight_scale
        assert isinstance(codes, Loaded) and codes.rows == 0
        codes.rows = 1  # SGLang changes the dimensions of a parameter in place
        layer.register_parameter("weight_packed", nn.Parameter(codes.data.t().reshape(2, -1), requires_grad=False))
        layer.register_parameter("weight_scale", nn.Parameter(scales.data.flip(0), requires_grad=False))
        layer.empty = torch.empty(0)


class CompressedTensorsWNA16MoE:
    """Packs in place, and only once."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "is_marlin_converted", False):
            return
        packed = layer.w13_weight_packed.data.flip(0).reshape(2, -1)
        layer.w13_weight_packed.resize_(packed.shape)
        layer.w13_weight_packed.copy_(packed)
        layer.is_marlin_converted = True


class Method:
    """What SGLang asks to pack a layer."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.scheme.process_weights_after_loading(layer)


class Linear(nn.Module):
    """Two parts of rows that are loaded apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scheme = CompressedTensorsWNA16()
        self.quant_method = Method()
        self.weight_packed = Loaded(torch.zeros(4, 3, dtype=torch.int32), self.load)
        self.weight_scale = Loaded(torch.zeros(4, 1), self.load)

    def load(self, parameter: Any, tensor: Tensor, part: int) -> None:
        assert parameter.rows == 0
        parameter.data[2 * part : 2 * part + 2].copy_(tensor)


class Experts(nn.Module):
    """Three experts, of which another rank has one."""

    def __init__(self) -> None:
        super().__init__()
        self.scheme = CompressedTensorsWNA16MoE()
        self.quant_method = Method()
        self.w13_weight_packed = nn.Parameter(torch.zeros(2, 4, dtype=torch.int32), requires_grad=False)
        self.w13_weight_packed.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: Any, tensor: Tensor, expert: int) -> None:
        if expert < 2:
            parameter.data[expert].copy_(tensor)


class Model(nn.Module):
    """Loads by name; remembers its parameters between loads, as some models of SGLang do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.experts = Linear(), Experts()
        self.norm = nn.Parameter(torch.zeros(3))

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        if not hasattr(self, "_cached_params_dict"):
            self._cached_params_dict = dict(self.named_parameters())
        for name, tensor in weights:
            parameter: Any = self._cached_params_dict[name.partition("/")[0]]
            if "/" in name:
                parameter.weight_loader(parameter, tensor, int(name.partition("/")[2]))
            else:
                parameter.data.copy_(tensor)

    def start(self) -> Model:
        """As SGLang starts with random weights: they are packed, too."""
        repacking.remember(self)
        for layer in (self.linear, self.experts):
            layer.quant_method.process_weights_after_loading(layer)
        return self


def update(value: int) -> dict[str, Tensor]:
    torch.manual_seed(value)
    tensors = {f"linear.weight_packed/{i}": torch.randint(99, (2, 3), dtype=torch.int32) for i in range(2)}
    tensors |= {f"linear.weight_scale/{i}": torch.randn(2, 1) for i in range(2)}
    tensors |= {f"experts.w13_weight_packed/{i}": torch.randint(99, (4,), dtype=torch.int32) for i in range(3)}
    return {**tensors, "norm": torch.randn(3)}


def send(model: Model, tensors: dict[str, Tensor], last: bool = True) -> None:
    for name, tensor in tensors.items():
        made = Bucket()
        made.add(name, tensor)
        flat = made.flatten()
        load(model, [(json.dumps(flat.tensors), flat.array)])
    if last:
        load(model, [(COMPLETE, torch.empty(0))])


def expected(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    codes, scales = (torch.cat([tensors[f"linear.{name}/{i}"] for i in range(2)]) for name in repacking._PACKED)
    experts = torch.stack([tensors[f"experts.w13_weight_packed/{i}"] for i in range(2)])
    return {
        "linear.weight_packed": codes.t().reshape(2, -1),
        "linear.weight_scale": scales.flip(0),
        "experts.w13_weight_packed": experts.flip(0).reshape(2, -1),
        "norm": tensors["norm"],
    }


def check(model: Model, tensors: dict[str, Tensor]) -> None:
    found = dict(model.named_parameters())
    assert found.keys() == expected(tensors).keys()
    assert all(torch.equal(found[name], wanted) for name, wanted in expected(tensors).items())


def test_every_update_is_packed_into_the_memory_that_sglang_computes_with() -> None:
    model = Model().start()
    before, workspace, empty = dict(model.named_parameters()), model.linear.scheme.workspace, model.linear.empty
    for value in range(3):
        workspace.fill_(7.0)  # what the memory saver leaves
        send(model, update(value))
        check(model, update(value))
        assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
        assert model.linear.scheme.workspace is workspace and not workspace.any() and model.linear.empty is empty
    assert not unwritten_parameters(model)


def test_a_layer_is_packed_when_it_is_complete_and_has_no_memory_before_its_first_tensor() -> None:
    model = Model().start()
    computing, tensors = model.linear.weight_packed, update(1)
    send(model, {"norm": tensors["norm"]}, last=False)
    assert model.linear.weight_packed.untyped_storage().size() == 0
    linear = {name: tensor for name, tensor in tensors.items() if name.startswith("linear")}
    send(model, linear, last=False)
    assert torch.equal(computing, expected(tensors)["linear.weight_packed"])
    assert model.linear.weight_packed.untyped_storage().size() == 0
    send(model, {name: tensor for name, tensor in tensors.items() if name.startswith("experts")})
    check(model, tensors)


@pytest.mark.parametrize("arrived", [1, 3, 5, 8])
def test_an_update_that_ended_part_way_is_replaced_by_the_next(arrived: int) -> None:
    model = Model().start()
    send(model, dict([*update(1).items()][:arrived]), last=False)
    send(model, update(2))
    check(model, update(2))


def test_an_update_without_a_part_of_a_layer_is_refused() -> None:
    model, tensors = Model().start(), update(1)
    del tensors["linear.weight_scale/1"]
    with pytest.raises(RuntimeError, match="only a part of weight_packed, weight_scale of a Linear"):
        send(model, tensors)


def test_a_packed_form_that_changed_is_refused() -> None:
    model = Model().start()
    model.linear.scheme.process_weights_after_loading = lambda layer: layer.register_parameter(  # type: ignore[method-assign]
        "weight_packed", nn.Parameter(torch.zeros(5, 5, dtype=torch.int32), requires_grad=False)
    )
    with pytest.raises(
        RuntimeError, match=r"packed weight_packed as torch.int32 \[5, 5\], and before as torch.int32 \[2, 6\]"
    ):
        send(model, update(1))
