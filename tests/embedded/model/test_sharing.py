"""An engine's tensors where the trainer's lie, and never written to there."""

from __future__ import annotations

import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_embedded.model.load import load_model
from miles_embedded.model.load_units import Update
from miles_embedded.model.views import export
from miles_testing.tiny import tiny_checkpoint


@pytest.fixture(scope="module", params=["qwen3_moe", "llama", "gpt_oss"])
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
