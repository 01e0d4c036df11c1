"""Which parameters of SGLang's model an update reached."""

from __future__ import annotations

import json
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from miles_sglang import inside
from miles_sglang.buckets import Bucket
from miles_sglang.coverage import ignored_parameters, tied_head
from miles_sglang.loader import COMPLETE, load, unwritten_parameters
from miles_workers.transport import Coverage


class Model(nn.Module):
    """A fused parameter, one in FP8, a scale of cached keys, an alias, and an output layer."""

    def __init__(self, tied: bool = False, threads: bool = False) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(tie_word_embeddings=tied)
        self.threads = threads
        self.embed_tokens, self.attn, self.lm_head = nn.Module(), nn.Module(), nn.Module()
        self.embed_tokens.weight = nn.Parameter(torch.rand(6, 4))
        self.lm_head.weight = nn.Parameter(torch.rand(6, 4))
        self.attn.fused = nn.Parameter(torch.rand(5, 4))
        self.attn.codes = nn.Parameter(torch.rand(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.attn.k_scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.attn.scalar = nn.Parameter(torch.tensor(1.0))
        self.alias = nn.Parameter(self.attn.fused.data)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        places = {
            "model.embed_tokens.weight": self.embed_tokens.weight,
            "lm_head.weight": self.lm_head.weight,
            "fused": self.attn.fused,
            "codes": self.attn.codes,
            "scalar": self.attn.scalar,
        }
        if self.threads:
            with ThreadPoolExecutor() as executor:
                list(executor.map(lambda each: places[each[0]].data.copy_(each[1]), weights))
            return
        for name, tensor in weights:
            places[name].data.copy_(tensor)


def update(without: tuple[str, ...] = ()) -> list[tuple[str, Tensor]]:
    tensors = {
        "model.embed_tokens.weight": torch.rand(6, 4),
        "lm_head.weight": torch.rand(6, 4),
        "fused": torch.rand(5, 4),
        "codes": torch.rand(4, 4).to(torch.float8_e4m3fn),
        "scalar": torch.rand(()),
    }
    made = Bucket()
    for name, tensor in tensors.items():
        if name not in without:
            made.add(name, tensor)
    flat = made.flatten()
    return [(json.dumps(flat.tensors), flat.array)]


def end() -> list[tuple[str, Tensor]]:
    return [(COMPLETE, torch.empty(0, dtype=torch.uint8))]


@pytest.mark.parametrize("threads", [False, True])
def test_an_update_that_reaches_all_leaves_nothing(threads: bool) -> None:
    model = Model(threads=threads)
    load(model, [*update(), *end()])
    assert unwritten_parameters(model) == []


def test_what_no_update_reached_is_named_and_is_as_it_was() -> None:
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    load(model, update(without=("lm_head.weight", "codes", "scalar")))
    load(model, end())
    assert unwritten_parameters(model) == ["attn.codes", "attn.scalar", "lm_head.weight"]
    for name in ("attn.codes", "attn.scalar", "attn.k_scale", "lm_head.weight"):
        now = dict(model.named_parameters())[name].detach()
        assert torch.equal(now.float(), before[name].float()), name


def test_what_sglang_creates_and_does_not_use_needs_no_update() -> None:
    unused = {"layer": nn.ModuleDict({"q_norm": nn.LayerNorm(4, bias=False)}), "used": nn.Linear(4, 4, bias=False)}
    for name, unwritten in (
        ("FalconH1ForCausalLM", ["used.weight"]),
        ("Other", ["layer.q_norm.weight", "used.weight"]),
    ):
        model = type(name, (nn.ModuleDict,), {})(unused)
        assert Coverage(model).finish(model, ignored_parameters(model)) == unwritten


def test_the_projection_of_a_head_without_a_bias_has_none() -> None:
    head = nn.Module()
    head.model = nn.Module()
    head.model.fc = nn.Linear(8, 4)
    inside.prepare_loading(head, iter([]), "cpu")
    assert not head.model.fc.bias.any() and head.model.fc.weight.any()


def test_only_the_first_complete_update_is_asked() -> None:
    model = Model()
    load(model, [*update(), *end()])
    load(model, [*update(without=("codes",)), *end()])
    assert unwritten_parameters(model) == []


def test_a_parameter_in_other_memory_was_written() -> None:
    model = Model()
    coverage = Coverage(model)
    model.lm_head.weight = nn.Parameter(torch.rand(6, 4))
    assert "lm_head.weight" not in coverage.finish(model, ignored_parameters(model))


def test_an_engine_may_set_another_default_device() -> None:
    model = Model()
    with torch.device("meta"):  # as vLLM sets its GPU while it loads weights
        coverage = Coverage(model)
    assert "lm_head.weight" in coverage.finish(model)


def test_a_tied_head_that_the_model_has_apart_is_loaded_at_every_update() -> None:
    model = Model(tied=True)
    for _ in range(3):
        load(model, [*update(without=("lm_head.weight",)), *end()])
        assert torch.equal(model.lm_head.weight, model.embed_tokens.weight)
    assert unwritten_parameters(model) == []


def test_a_head_is_added_only_where_it_belongs() -> None:
    embedding = ("model.embed_tokens.weight", torch.rand(6, 4))
    assert [name for name, _ in tied_head(Model(tied=True), [embedding])] == ["lm_head.weight"]
    assert not tied_head(Model(tied=False), [embedding])
    assert not tied_head(Model(tied=True), [embedding, ("lm_head.weight", torch.rand(6, 4))])
    assert not tied_head(Model(tied=True), [("model.layers.9.embed_tokens.weight", torch.rand(6, 4))])
    inside_another = Model()
    inside_another.config = types.SimpleNamespace(text_config=types.SimpleNamespace(tie_word_embeddings=True))
    assert tied_head(inside_another, [embedding])


def test_files_are_read_into_a_tied_head_too() -> None:
    (_, weights, device), _ = inside.prepare_loading(
        Model(tied=True), iter([("model.embed_tokens.weight", torch.rand(6, 4)), ("fused", torch.rand(5, 4))]), "cpu"
    )
    assert [name for name, _ in weights] == ["model.embed_tokens.weight", "lm_head.weight", "fused"] and device == "cpu"


def test_a_scheduler_reports_them() -> None:
    model: Any = Model()
    scheduler = types.SimpleNamespace(tp_worker=types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model)))
    load(model, [*update(without=("lm_head.weight",)), *end()])
    with pytest.raises(RuntimeError, match=r"^lm_head\.weight of SGLang's Model$"):
        inside.check_coverage(scheduler)

    def rpc(method: str) -> None:
        raise AssertionError(method)

    server = types.SimpleNamespace(enable_dp_attention=False)
    assert inside.ask_coverage(types.SimpleNamespace(server_args=server, collective_rpc=rpc)) == "miles_coverage"
    server.enable_dp_attention = True
    assert inside.ask_coverage(types.SimpleNamespace(server_args=server, collective_rpc=rpc)) == ""
