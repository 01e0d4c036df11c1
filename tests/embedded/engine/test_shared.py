"""Policies in one batch against an engine each: the same responses, and separate pauses, versions and prefixes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from torch import nn

from miles_core.contracts.engine import Request, Sampling
from miles_core.data.weight_unit import Encoded
from miles_core.errors import MilesError, NonFiniteError, PluginError, SyncError
from miles_embedded.engine.decoder import AsyncSteps
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.engine.shared import SharedBatch, SharedEngine
from miles_embedded.model.call import active_context
from miles_embedded.model.load import load_model
from miles_embedded.model.storage import mark_constant
from miles_embedded.model.variants import VARIANTS, Variant, VariantParts
from miles_testing.tiny import tiny_checkpoint

PATH, NAME = "model.layers.0.mlp", "model.layers.0.mlp.shift"
PROMPTS = [[3, 4, 5, 6], [7, 8], [3, 4, 5, 6, 7, 8, 9]]


class Shifts(VariantParts):
    """Each variant adds its own vector to the output of a layer."""

    def __init__(self, model):
        self.capacity, self.table = 3, torch.zeros(3, model.config.hidden_size)
        layer = model.get_submodule(PATH)
        del layer._parameters["shift"]
        layer.register_forward_hook(self._add, prepend=True)

    def put(self, variant, model):
        self.table[variant] = model.get_parameter(NAME).detach()

    def holds(self, variant, model):
        return torch.equal(self.table[variant], model.get_parameter(NAME))

    def tensors(self):
        return [self.table]

    def _add(self, module, args, output):
        tokens = active_context().attached[VARIANTS]
        return output + (self.table[tokens.index] if tokens.only is None else self.table[tokens.only])


def shifted(checkpoint, shift=0.0):
    """A model whose layer adds a vector, the only weight that updates change."""
    model = load_model(checkpoint)
    mark_constant(model.parameters(), streamed=False)
    layer = model.get_submodule(PATH)
    layer.register_parameter("shift", nn.Parameter(shift_of(model, shift)))
    layer.register_forward_hook(lambda m, args, output: output + m.shift if "shift" in m._parameters else output)
    return model


def shift_of(model, shift):
    return shift * torch.linspace(-1, 1, model.config.hidden_size)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("shared") / "model")


def settings():
    return Settings(lambda tokens: "".join(chr(48 + t) for t in tokens), eos=[1])


def make_batch(checkpoint, static=False):
    batch = SharedBatch(shifted(checkpoint), settings(), Variant("shifts", Shifts))
    batch.async_steps = AsyncSteps(batch, used=static)
    batch.prompts.used = static
    return batch


def join(batch, checkpoint, *shifts):
    engines = [SharedEngine(shifted(checkpoint, shift), settings(), batch) for shift in shifts]
    asyncio.run(start(engines))
    return engines


async def start(engines):
    for engine in engines:
        await engine.start()


def alone(checkpoint, shift):
    return EmbeddedEngine(shifted(checkpoint, shift), settings())


def requests(temperature=0.9, count=12):
    return [
        Request(p, Sampling(count, temperature=temperature, ignore_eos=True), key=10 * i + k)
        for i, p in enumerate(PROMPTS)
        for k in range(3)
    ]


def update(engine, shift, version):
    tensor = shift_of(engine.model, shift)
    return engine.update_weights([Encoded(NAME, {NAME: tensor})], version)


def generate(*pairs):
    async def main():
        return await asyncio.gather(*(engine.generate(r) for engine, asked in pairs for r in asked))

    return asyncio.run(main())


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a.tokens, a.finish) == (b.tokens, b.finish)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_policy_generates_in_a_batch_as_alone(checkpoint, static, temperature):
    """Two policies send requests with the same prompts and keys. They share no cached prefix, and their tokens differ."""
    batch = make_batch(checkpoint, static)
    one, two = join(batch, checkpoint, 2.0, -2.0)
    asked = requests(temperature)
    got = generate((one, asked), (two, asked))
    expected = [generate((alone(checkpoint, shift), asked)) for shift in (2.0, -2.0)]
    assert_same(got, expected[0] + expected[1])
    assert [r.tokens for r in expected[0]] != [r.tokens for r in expected[1]]
    assert batch.async_steps.used == batch.prompts.used == static, batch.async_steps.refused + batch.prompts.refused
    assert batch.runner.cache.rows == batch.runner.cache.prefixes.size == 0


def test_other_policies_in_the_batch_do_not_matter(checkpoint):
    batch = make_batch(checkpoint)
    one, two, three = join(batch, checkpoint, 2.0, -2.0, 1.0)
    asked = requests()
    first = generate((one, asked), (two, asked))[: len(asked)]
    second = generate((three, asked[:2]), (one, asked))[2:]
    assert_same(first, second)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("static", [False, True])
def test_a_policy_is_updated_while_another_continues(checkpoint, mode, static):
    batch = make_batch(checkpoint, static)
    one, two = join(batch, checkpoint, 2.0, -2.0)
    asked = requests(count=24)

    async def main():
        await update(one, 2.0, 0)
        await update(two, -2.0, 5)
        calls = [asyncio.gather(*(engine.generate(r) for r in asked)) for engine in (one, two)]
        while not batch.rows or len(batch.rows[0].response) < 6:
            await asyncio.sleep(0)
        await one.pause(mode)
        before = {row: len(row.response) for row in batch.requests(0)}
        while not calls[1].done():  # the other policy's requests end
            await asyncio.sleep(0)
        assert {row: len(row.response) for row in batch.requests(0)} == before
        await update(one, 1.0, 1)
        await one.resume()
        return [await call for call in calls]

    mine, its = asyncio.run(main())
    assert_same(its, generate((alone(checkpoint, -2.0), asked)))
    assert {tuple(r.weight_versions) for r in its} == {((0, 5),)}
    assert {r.finish for r in mine} == {"abort" if mode == "abort" else "length"}
    versions = {tuple(v for _, v in r.weight_versions) for r in mine}
    assert versions == ({(0,)} if mode == "abort" else {(0, 1)})
    whole = generate((alone(checkpoint, 2.0), asked))
    # the tokens of the first version are those of an engine of its own
    for part, full in zip(mine, whole, strict=True):
        end = len(part.tokens) if mode == "abort" else part.weight_versions[1][0]
        assert part.tokens[:end] == full.tokens[:end]


def test_abort_ends_the_requests_of_one_policy(checkpoint):
    batch = make_batch(checkpoint)
    one, two = join(batch, checkpoint, 2.0, -2.0)
    asked = requests(count=24)

    async def main():
        calls = [asyncio.gather(*(engine.generate(r) for r in asked)) for engine in (one, two)]
        while not batch.rows:
            await asyncio.sleep(0)
        await one.abort([asked[0].key])
        return [await call for call in calls]

    mine, its = asyncio.run(main())
    assert [r.finish for r in mine] == ["abort"] + ["length"] * (len(asked) - 1)
    assert {r.finish for r in its} == {"length"}


def test_a_policy_joins_and_leaves_while_another_generates(checkpoint):
    batch = make_batch(checkpoint)
    one, two = join(batch, checkpoint, 2.0, -2.0)
    later = SharedEngine(shifted(checkpoint, 1.0), settings(), batch)
    asked = requests(count=24)

    async def main():
        call = asyncio.gather(*(one.generate(r) for r in asked))
        while not batch.rows:
            await asyncio.sleep(0)
        await two.stop()
        with pytest.raises(RuntimeError, match="call start first"):
            await two.generate(asked[0])
        await later.start()
        return await asyncio.gather(*(later.generate(r) for r in asked)), await call

    its, mine = asyncio.run(main())
    assert_same(its, generate((alone(checkpoint, 1.0), asked)))
    assert_same(mine, generate((alone(checkpoint, 2.0), asked)))
    assert batch.served == [one, later]
    asyncio.run(one.stop())
    asyncio.run(later.stop())
    assert not batch.runner.cache.prefixes.slabs


def test_a_failed_update_fails_the_requests_of_its_policy_only(checkpoint):
    batch = make_batch(checkpoint)
    one, two = join(batch, checkpoint, 2.0, -2.0)
    asked = requests(count=24)

    async def main():
        calls = [asyncio.gather(*(engine.generate(r) for r in asked), return_exceptions=True) for engine in (one, two)]
        while not batch.rows:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="requests in flight"):
            await update(one, 1.0, 1)
        await one.pause("in_place")
        with pytest.raises(MilesError, match="incomplete"):
            await one.update_weights([], 1)
        await one.resume()
        with pytest.raises(MilesError, match="no complete weights"):
            await one.generate(asked[0])
        return [await call for call in calls]

    mine, its = asyncio.run(main())
    assert all("no complete weights" in str(error) for error in mine)
    assert_same(its, generate((alone(checkpoint, -2.0), asked)))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_values_that_are_not_finite_fail_the_requests_of_their_policy_only(checkpoint, static, temperature):
    batch = make_batch(checkpoint, static)
    one, two = join(batch, checkpoint, 2.0, -2.0)
    asked = requests(temperature)

    async def main():
        mine = asyncio.gather(*(one.generate(r) for r in asked))
        while not batch.rows or len(batch.rows[0].response) < 6:
            await asyncio.sleep(0)
        await two.pause()
        await update(two, float("nan"), 7)
        await two.resume()
        with pytest.raises(NonFiniteError, match=r"weight version 7: the output of model\.layers\.0\.mlp "):
            await two.generate(asked[0])
        return await mine

    assert_same(asyncio.run(main()), generate((alone(checkpoint, 2.0), asked)))


def test_a_batch_with_other_parts_than_the_policy_is_found(checkpoint):
    batch = make_batch(checkpoint)
    (one,) = join(batch, checkpoint, 2.0)
    assert NAME in asyncio.run(one.weight_checksums([NAME]))[""]
    batch.parts.table += 1
    with pytest.raises(SyncError, match="other weights"):
        asyncio.run(one.weight_checksums([NAME]))


def test_a_variant_whose_shared_weights_are_updated_is_refused(checkpoint):
    batch = make_batch(checkpoint)
    model = load_model(checkpoint)
    model.get_submodule(PATH).register_parameter("shift", nn.Parameter(shift_of(model, 1.0)))
    with pytest.raises(PluginError, match=r"embed_tokens\.weight .* is updated"):
        asyncio.run(SharedEngine(model, settings(), batch).start())
