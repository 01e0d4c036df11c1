"""An engine's tensors where the trainer's lie, and never written to there."""

from __future__ import annotations

import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_core.precision.codec import Codec
from miles_embedded.model.load import load_model
from miles_embedded.model.load_units import Update
from miles_embedded.model.views import export, sources
from miles_formats.codec import FormatCodec
from miles_fp8.format import Fp8
from miles_testing.tiny import tiny_checkpoint


@pytest.fixture(scope="module", params=["qwen3_moe", "llama", "gpt_oss"])  # Llama with tied embeddings
def checkpoint(request, tmp_path_factory):
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("family") / request.param)


def plain(model, lasting=True):
    for unit in export(model):
        for name, tensor in unit.tensors.items():
            yield Encoded(name, {name: tensor}, lasting=lasting)


def update(model, units, shared, share=True):
    made = Update(model, None, shared, share)
    made.take(units)
    return made.finish()


def addresses(model):
    return [p.data_ptr() for p in model.state_dict().values()]


def test_everything_is_shared_once_and_nothing_is_copied(checkpoint):
    trainer, engine, shared = load_model(checkpoint), load_model(checkpoint), set()
    kinds = [type(p) for p in engine.state_dict(keep_vars=True).values()]
    for _ in range(2):
        assert update(engine, plain(trainer), shared) == 0
        assert addresses(engine) == addresses(trainer)
    assert [type(p) for p in engine.state_dict(keep_vars=True).values()] == kinds
    with torch.no_grad():
        next(trainer.parameters()).add_(1)
    assert torch.equal(next(engine.parameters()), next(trainer.parameters()))


def test_other_numbers_take_the_memory_back(checkpoint):
    trainer, engine, shared = load_model(checkpoint), load_model(checkpoint), set()
    update(engine, plain(trainer), shared)
    kept = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    twice = (Encoded(u.name, {n: 2 * t for n, t in u.parts.items()}) for u in plain(trainer))
    assert update(engine, twice, shared, share=False) == sum(t.nbytes for u in plain(trainer) for t in u.parts.values())
    assert not shared and all(torch.equal(kept[name], tensor) for name, tensor in trainer.state_dict().items())
    assert torch.equal(next(engine.parameters()), 2 * next(trainer.parameters()))


def test_what_does_not_stay_is_copied(checkpoint):
    trainer, engine, shared = load_model(checkpoint), load_model(checkpoint), set()
    assert update(engine, plain(trainer, lasting=False), shared) > 0 and not shared
    assert not set(addresses(engine)) & set(addresses(trainer))


def test_a_tensor_of_which_a_part_is_another_s_is_copied_whole(checkpoint):
    trainer, engine, shared = load_model(checkpoint), load_model(checkpoint), set()
    units = list(plain(trainer))
    name = next(u.name for u in units if "down_proj" in u.name)
    mixed = [Encoded(u.name, {u.name: u.parts[u.name].clone()}) if u.name == name else u for u in units]
    copied = update(engine, mixed, shared)
    apart = [n for n, p in engine.state_dict().items() if p.data_ptr() != trainer.state_dict()[n].data_ptr()]
    assert len(apart) == 1 and copied == trainer.state_dict()[apart[0]].nbytes
    assert all(torch.equal(p, trainer.state_dict()[n]) for n, p in engine.state_dict().items())


def randomize(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def load_each(model, units, decode=None):
    """Load tensors that do not stay, each by a copy of its own."""
    made = Update(model, decode)
    for unit in units:
        made.take([Encoded(unit.name, {n: t.clone() for n, t in unit.parts.items()}, unit.format)])
    return made.finish()


def assert_equal(one, other):
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_copied_as_a_whole_equal_tensors_copied_one_by_one(checkpoint, dtype, monkeypatch):
    trainer, together, apart = randomize(load_model(checkpoint)), *(load_model(checkpoint, dtype) for _ in range(2))
    plain_copy, launched = torch._foreach_copy_, []

    def foreach_copy(targets, tensors):
        launched.extend(targets)
        plain_copy(targets, tensors)

    monkeypatch.setattr(torch, "_foreach_copy_", foreach_copy)
    nbytes = update(together, plain(trainer), set(), share=False)
    assert len(launched) == len(sources(trainer))
    assert nbytes == load_each(apart, plain(trainer))
    assert_equal(together, apart)
    if dtype == "float32":
        assert_equal(together, trainer)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_quantized_and_plain_tensors_of_an_update_equal_tensors_loaded_one_by_one(family, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    checkpoint = tiny_checkpoint(family, tmp_path, **sizes)
    trainer, together, apart = (load_model(checkpoint, "bfloat16") for _ in range(3))
    codec = FormatCodec(Fp8())
    randomize(trainer)
    assert {unit.format for unit in codec.encode(export(trainer))} == {"", "fp8"}
    made = Update(together, codec.decode)
    made.take(codec.encode(export(trainer)))
    assert made.finish() == load_each(apart, codec.encode(export(trainer)), codec.decode)
    assert_equal(together, apart)


def test_tensors_that_a_hook_replaced_are_copied_with_the_others(checkpoint):
    trainer, together, apart = (load_model(checkpoint) for _ in range(3))
    randomize(trainer)

    def merged(stays):
        """Replace every second tensor, as an export of merged adapters does; some parts of joined experts among them."""
        for number, unit in enumerate(plain(trainer)):
            tensor = unit.parts[unit.name]
            replaced = number % 2 == 0
            yield Encoded(unit.name, {unit.name: 3 * tensor if replaced else tensor}, lasting=stays or not replaced)

    assert update(together, list(merged(False)), set(), share=False) == load_each(apart, merged(False))
    assert_equal(together, apart)
    update(randomize(together), list(merged(True)), set(), share=False)  # lasting parts in several allocations
    assert_equal(together, apart)


def test_an_export_follows_parameters_that_get_other_memory(checkpoint):
    trainer, engine = load_model(checkpoint), load_model(checkpoint)
    update(engine, plain(trainer), set(), share=False)
    for parameter in trainer.parameters():
        parameter.data = torch.randn_like(parameter)
    update(engine, plain(trainer), set(), share=False)
    assert_equal(engine, trainer)
    assert {unit.lasting for unit in Codec().encode(export(trainer))} == {True}
    again = {n: t for unit in export(trainer) for n, t in unit.tensors.items()}
    assert all(tensor is again[name] for unit in export(trainer) for name, tensor in unit.tensors.items())
