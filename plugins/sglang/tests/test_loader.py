"""Buckets as a scheduler of SGLang loads them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from miles_sglang.buckets import Bucket
from miles_sglang.loader import COMPLETE, _unpack, load


class Model(nn.Module):
    """Fuses two tensors into one parameter, keeps half of a third, and takes a fourth as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.part = nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(3, 2))
        self.own = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.loads = 0

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        self.loads += 1
        for name, tensor in weights:
            if name == "gate":
                self.fused.data[:2].copy_(tensor)
            elif name == "up":
                self.fused.data.narrow(0, 2, 3).copy_(self.changed(tensor))
            elif name == "half":
                self.part.data.copy_(tensor.narrow(1, 2, 2))
            else:
                self.own.data.copy_(tensor)

    def changed(self, tensor: Tensor) -> Tensor:
        return tensor


class Computing(Model):
    """Does more than copying."""

    def changed(self, tensor: Tensor) -> Tensor:
        return tensor * 2


class Padded(Model):
    """Has a row more than it loads, as SGLang's embeddings do."""

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.fused.data[5:].fill_(2.0)
        self.fused.data[6:].zero_()

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(6, 4))


class Clearing(Model):
    """Fills what it has loaded."""

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        self.fused.data.zero_()
        super().load_weights(weights)


def bucket(seed: int) -> tuple[dict[str, Tensor], list[tuple[str, Tensor]]]:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"gate": (2, 4), "up": (3, 4), "half": (3, 4), "own": (3,)}
    tensors = {n: torch.randn(size, dtype=torch.bfloat16 if n == "own" else None) for n, size in sizes.items()}
    made = Bucket()
    for name, tensor in tensors.items():
        made.add(name, tensor)
    flat = made.flatten()
    return tensors, [(json.dumps(flat.tensors), flat.array)]


def check(model: Model, tensors: dict[str, Tensor]) -> None:
    assert torch.equal(model.fused.data[:5], torch.cat([tensors["gate"], model.changed(tensors["up"])]))
    assert (model.fused.data[5:] == 2.0).all()
    assert torch.equal(model.part.data, tensors["half"][:, 2:]) and torch.equal(model.own.data, tensors["own"])


@pytest.mark.parametrize(("kind", "loads"), [(Model, 1), (Padded, 1), (Computing, 3), (Clearing, 3)])
def test_what_only_copies_is_done_by_name_once(kind: type[Model], loads: int) -> None:
    model = kind()
    for seed in range(3):
        tensors, named = bucket(seed)
        model.fused.data[5:] = 7.0  # memory that was given away and came back
        load(model, named)
        check(model, tensors)
    assert model.loads == loads


def test_parameters_that_moved_are_found_again() -> None:
    model = Model()
    load(model, bucket(0)[1])
    old, model.fused.data = model.fused.data, torch.zeros(5, 4)
    tensors, named = bucket(1)
    load(model, named)
    check(model, tensors)
    assert model.loads == 2 and not torch.equal(old, model.fused.data)
    load(model, bucket(2)[1])
    assert model.loads == 2


def test_weights_from_host_memory_go_to_sglang_s_gpu_where_there_is_one() -> None:
    made = Bucket()
    made.add("own", torch.ones(3))
    assert made.flatten().array.device.type == "cpu"
    assert made.flatten("meta").array.device.type == "meta"  # stands for a GPU: nothing of it is read here
    away = Bucket()
    away.add("own", torch.ones(3, device="meta"))
    assert away.flatten("cpu").array.device.type == "meta"  # what is on a device stays there


def test_a_bucket_without_a_tensor_of_the_model_loads_nothing() -> None:
    class Draft(Model):
        def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
            self.loads += 1

    model, found = Draft(), []
    for seed in range(3):
        load(model, [(table, array.to("meta")) for table, array in bucket(seed)[1]])  # stands for a GPU
        found.append(model.fused.detach().clone().view(torch.int32))
    assert model.loads == 1
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_threads_copy_out_of_host_memory_is_not_forgotten() -> None:
    class Threaded(Model):
        """As SGLang's DeepSeek: a thread for each tensor that is in host memory."""

        def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
            with ThreadPoolExecutor() as executor:
                list(executor.map(super().load_weights, [[each] for each in weights[:2]]))
            super().load_weights(weights[2:])

    model = Threaded()
    for seed in range(2):
        tensors, named = bucket(seed)
        load(model, named)
        check(model, tensors)


class Forgetful(nn.Module):
    """Takes codes, and the scales of their blocks for something else, as SGLang's Llama does."""

    stacked_params_mapping = (("gate_up_proj", "gate_proj", 0, 2), ("gate_up_proj", "up_proj", 1, 2))

    def __init__(self, scaled: bool = True) -> None:
        super().__init__()
        for name, scales in (("gate_up_proj", 2), ("down_proj", 1)):
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.zeros(scales * 4, 8))
            if scaled:
                layer.weight_scale_inv = nn.Parameter(torch.zeros(scales, 1))
                layer.weight_scale_inv.weight_loader = self.put
            self.add_module(name, layer)

    def put(self, parameter: nn.Parameter, tensor: Tensor, shard: int | None = None) -> None:
        parameter.data.narrow(0, shard or 0, 1).copy_(tensor)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name.endswith(".weight") and "other" not in name:  # the layers of another rank are passed over, whole
                rows = 4 if "up_proj" in name else 0
                layer = self.down_proj if "down" in name else self.gate_up_proj
                layer.weight.data[rows : rows + 4].copy_(tensor)


def test_scales_that_a_model_forgets_are_loaded_or_missed() -> None:
    model = Forgetful()
    for seed in (0, 1):  # by name, and as remembered copies
        made, tensors = Bucket(), {}
        torch.manual_seed(seed)
        for part in ("gate_proj", "up_proj", "down_proj", "other.down_proj"):
            tensors[f"{part}.weight"], tensors[f"{part}.weight_scale_inv"] = torch.randn(4, 8), torch.randn(1, 1)
        for name, tensor in tensors.items():
            made.add(name, tensor)
        flat = made.flatten()
        named = [(json.dumps(flat.tensors), flat.array)]
        load(model, named)
        found = [tensors[f"{part}.weight_scale_inv"] for part in ("gate_proj", "up_proj")]
        assert torch.equal(model.gate_up_proj.weight_scale_inv.data, torch.cat(found))
        assert torch.equal(model.down_proj.weight_scale_inv.data, tensors["down_proj.weight_scale_inv"])
    with pytest.raises(
        RuntimeError, match=r"Forgetful loaded the codes of gate_proj\.weight_scale_inv but has no parameter"
    ):
        load(Forgetful(scaled=False), named)


def test_host_tensors_of_one_block_are_copied_in_one_piece() -> None:
    block = torch.zeros(4 * 64, dtype=torch.uint8)
    values = {"b": torch.randn(3, 5), "a": torch.randn(7).to(torch.bfloat16)}
    spots = {"b": block[64:124].view(torch.float32).view(3, 5), "a": block[128:142].view(torch.bfloat16)}
    made = Bucket()
    for name, value in values.items():
        made.add(name, spots[name].copy_(value))
    flat = made.flatten()
    assert [(name, start) for name, _, _, start in flat.tensors] == [("b", 0), ("a", 64)]
    assert flat.array.numel() == 64 + 14 and flat.array.data_ptr() != block[64:].data_ptr()
    block.zero_()
    for name, tensor in _unpack(json.dumps(flat.tensors), flat.array):
        assert torch.equal(tensor, values[name])


@pytest.mark.parametrize("apart", ["far", "unaligned", "transposed"])
def test_host_tensors_that_are_not_in_one_block_are_copied_one_by_one(apart: str) -> None:
    block = torch.arange(8 * 64, dtype=torch.uint8)
    second = {"far": block[384:448], "unaligned": block[66:130], "transposed": block[64:128].view(8, 8).T}[apart]
    made = Bucket()
    made.add("a", block[:64])
    made.add("b", second)
    flat = made.flatten()
    assert flat.tensors == made.tensors and flat.array.numel() == made.size == 128
    found = dict(_unpack(json.dumps(flat.tensors), flat.array))
    assert torch.equal(found["a"], block[:64]) and torch.equal(found["b"], second)


class Router(nn.Module):
    """Multiplies with a copy of its weight that it made when it first computed, as SGLang's ``Glm4MoeGate`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
        self.register_buffer("_weight_fp32", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self._weight_fp32 is None:
            self._weight_fp32 = self.weight.data.float()
        return nn.functional.linear(x, self._weight_fp32)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        self.gate.weight.data.copy_(weights[0][1])


def test_a_router_computes_with_updated_weights_also_if_it_keeps_a_copy() -> None:
    model = Routed()
    assert model.gate(torch.ones(1, 2)).sum() == 0
    kept = model.gate._weight_fp32.data_ptr()
    for value in (1.0, 3.0):
        made = Bucket()
        made.add("gate.weight", torch.full((2, 2), value, dtype=torch.bfloat16))
        flat = made.flatten()
        load(model, [(json.dumps(flat.tensors), flat.array), (COMPLETE, torch.empty(0))])
        assert (model.gate(torch.ones(1, 2)) == 2 * value).all()
    assert model.gate._weight_fp32.data_ptr() == kept  # CUDA graphs read this memory


def test_a_draft_of_its_own_loads_the_tensors_with_its_prefix_and_the_policy_the_others() -> None:
    policy, draft = Model(), Model()
    draft.miles_separate_draft = True
    for value in (1.0, 2.0, 3.0):
        made = Bucket()
        made.add("own", torch.full((3,), value, dtype=torch.bfloat16))
        made.add("draft.own", torch.full((3,), 10 * value, dtype=torch.bfloat16))
        flat = made.flatten()
        for model in (draft, policy):
            load(model, [(json.dumps(flat.tensors), flat.array), (COMPLETE, torch.empty(0))])
        assert (policy.own == value).all() and (draft.own == 10 * value).all()
    assert policy.loads == draft.loads == 1  # the copies are replayed
