"""A sync whose tensors are those of the last one copies them again, with their new values; anything else is loaded tensor by tensor."""

from __future__ import annotations

import copy

import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_core.errors import CheckpointError
from miles_core.precision.codec import Codec
from miles_core.precision.products import Products
from miles_embedded.engine.weights import Weights
from miles_embedded.model.load import load_model
from miles_embedded.model.views import export, sources
from miles_testing.tiny import tiny_checkpoint


@pytest.fixture(params=["qwen3_moe", "llama", "gpt_oss"])  # Llama with tied embeddings
def sides(request, tmp_path, monkeypatch):
    """A trainer, an engine, and the number of updates that were loaded tensor by tensor."""
    checkpoint = tiny_checkpoint(request.param, tmp_path / request.param)
    trainer, engine = load_model(checkpoint), Weights(load_model(checkpoint), Codec(), Products())
    loaded, load = [], Weights.load
    monkeypatch.setattr(Weights, "load", lambda self, *args: loaded.append(args[1]) or load(self, *args))
    return trainer, engine, loaded


def plain(model):
    return [
        Encoded(name, {name: tensor}, lasting=unit.lasting)
        for unit in export(model)
        for name, tensor in unit.tensors.items()
    ]


def train(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))


def equal(trainer, engine):
    of_engine = sources(engine.model)
    return all(torch.equal(tensor, of_engine[name]) for name, tensor in sources(trainer).items())


def test_the_same_tensors_are_copied_again(sides):
    trainer, engine, loaded = sides
    units = plain(trainer)
    for version in range(3):
        train(trainer)
        assert engine.update(iter(units), version) == sum(unit.nbytes for unit in units)
        assert equal(trainer, engine) and engine.version == version and engine.complete
    assert loaded == [0]


def move(model, change, name):
    """Give a parameter other memory."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if change == "memory":
        module._parameters[attribute].data = module._parameters[attribute].data.clone()
    elif change == "parameter":
        setattr(module, attribute, torch.nn.Parameter(module._parameters[attribute].detach().clone()))
    else:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, copy.deepcopy(module))


@pytest.mark.parametrize("change", ["none", "memory", "parameter", "module"])
def test_checksums_are_those_of_what_the_model_computes_with(sides, change):
    trainer, engine, _ = sides
    engine.update(iter(plain(trainer)), 0)
    names = [unit.name for unit in plain(trainer)]
    before = engine.checksums(names)
    name = next(name for name, _ in engine.model.named_parameters() if "layernorm" in name)
    if change != "none":
        move(engine.model, change, name)
    assert engine.checksums(names) == before
    with torch.no_grad():
        engine.model.get_parameter(name)[3] += 1
    after = engine.checksums(names)
    assert {name for name in names if after[name] != before[name]} == {name}


@pytest.mark.parametrize(
    "change", ["another object", "another order", "one more", "memory", "parameter", "module", "sleep"]
)
def test_anything_else_is_loaded(sides, change):
    trainer, engine, loaded = sides
    units = plain(trainer)
    engine.update(iter(units), 0)
    train(trainer)
    name = next(name for name, _ in engine.model.named_parameters() if "layernorm" in name)  # it is not tied
    if change == "another object":
        units[3] = Encoded(units[3].name, dict(units[3].parts), lasting=True)
    elif change == "another order":
        units[2], units[4] = units[4], units[2]
    elif change == "one more":
        units.append(units[0])
    elif change == "sleep":
        engine.release()
        engine.restore()
    else:
        move(engine.model, change, name)
    engine.update(iter(units), 1)
    assert loaded == [0, 1] and equal(trainer, engine)


def test_a_part_of_them_is_an_incomplete_update(sides):
    trainer, engine, _ = sides
    units = plain(trainer)
    engine.update(iter(units), 0)
    with pytest.raises(CheckpointError, match="incomplete"):
        engine.update(iter(units[:-1]), 1)
    assert not engine.complete
    engine.update(iter(units), 2)
    assert engine.complete and equal(trainer, engine)


@pytest.mark.parametrize("change", ["passing", "verified", "shared"])
def test_only_plain_copies_are_repeated(sides, change):
    trainer, engine, _ = sides
    units = plain(trainer)
    units[5].lasting = change != "passing"
    if change == "verified":
        units[5].copy = lambda to, part: to.copy_(part)
    engine.update(iter(units), 0, change == "shared")
    assert engine._last is None
    assert equal(trainer, engine)


def test_the_recorded_update_is_the_whole(sides):
    trainer, engine, _ = sides
    units = plain(trainer)
    engine.update(iter(units), 0)
    last = engine._last
    assert all(a is b for a, b in zip(last.units, units, strict=True))
    assert last.nbytes == sum(tensor.nbytes for _, tensors in last._copies for tensor in tensors)
