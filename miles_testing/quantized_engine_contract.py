"""What an engine that takes weights in a number format must do beside ``EngineContract``.

class TestMyEngine(QuantizedEngineContract):
    def format(self):
        return MyFormat()

    async def make(self, checkpoint, limits, codec):
        return MyEngine(checkpoint, codec=codec, **vars(limits))
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from miles_core.contracts.engine import Engine
from miles_core.data.unit import Encoded, Unit
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format
from miles_mismatch.parity import check, probes
from miles_testing.asking import ask
from miles_testing.engine_contract import FREE, GREEDY, PROMPTS, Limits
from miles_testing.stored import stored_units
from miles_testing.tiny import tiny_checkpoint


class QuantizedEngineContract:
    """Subclass it and write ``format`` and ``make``.

    Attributes:
        family: of ``miles_testing.tiny.FAMILIES``.
        sizes: of the tiny model, such that every matrix can be stored.
        atol: how far log-probabilities of the same tokens may be apart between an updated and a fresh engine.
    """

    family = "qwen3_moe"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}  # noqa: RUF012
    atol = 1e-4

    def format(self) -> Format:
        """The number format."""
        raise NotImplementedError

    async def make(self, checkpoint: Path, limits: Limits, codec: Codec) -> Engine:
        """A new engine for ``checkpoint``'s architecture that reads what ``codec`` encodes, not yet started."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def encoded(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Encoded]]]:
        """A checkpoint, and three sets of weights for it in the format."""
        root = tmp_path_factory.mktemp("quantized")
        codec = Codec(self.format())
        paths = [tiny_checkpoint(self.family, root / str(seed), seed, **self.sizes) for seed in range(3)]
        return paths[0], [list(codec.encode(coupled(path))) for path in paths]

    @pytest.fixture(scope="class")
    def runner(self) -> Iterator[asyncio.Runner]:
        """One event loop for the class."""
        with asyncio.Runner() as runner:
            yield runner

    def test_two_updates_in_place_equal_a_fresh_load(
        self, runner: asyncio.Runner, encoded: tuple[Path, list[list[Encoded]]]
    ) -> None:
        checkpoint, versions = encoded
        engine, fresh = (runner.run(self._started(checkpoint)) for _ in range(2))
        try:
            if engine.hot_update(self.format().name) != "in_place":
                pytest.skip("the engine does not change weights in this format while it runs")
            runner.run(engine.update_weights(versions[0], 0))
            first = ask(runner, engine, PROMPTS, GREEDY)
            for version in (1, 2):  # twice, with requests before and between, so that nothing cached survives
                runner.run(engine.update_weights(versions[version], version))
                updated = [*ask(runner, engine, PROMPTS, GREEDY), *ask(runner, engine, PROMPTS, FREE)]
            runner.run(fresh.update_weights(versions[2], 2))
            loaded = [*ask(runner, fresh, PROMPTS, GREEDY), *ask(runner, fresh, PROMPTS, FREE)]
        finally:
            for one in (engine, fresh):
                runner.run(one.stop())
        assert [r.tokens for r in updated[:5]] == [r.tokens for r in loaded[:5]]
        assert [r.tokens for r in updated[:5]] != [r.tokens for r in first]
        if "keyed_sampling" in engine.capabilities:
            for a, b in zip(updated, loaded, strict=True):
                np.testing.assert_allclose(a.log_probs, b.log_probs, atol=self.atol)

    def test_parity_is_declared_and_holds(
        self, runner: asyncio.Runner, encoded: tuple[Path, list[list[Encoded]]]
    ) -> None:
        format = self.format()
        engine = runner.run(self._started(encoded[0]))
        try:
            check(type(engine).__name__, format, engine.quantizer(format), probes(format))
        finally:
            runner.run(engine.stop())

    async def _started(self, checkpoint: Path) -> Engine:
        engine = await self.make(checkpoint, Limits(), Codec(self.format()))
        await engine.start()
        return engine


def coupled(checkpoint: Path) -> list[Unit]:
    """A checkpoint's tensors as units, gate and up of one expert together."""
    plain = {e.name: e.parts[e.name] for e in stored_units(checkpoint)}
    units = []
    for name, tensor in plain.items():
        if ".gate_proj." in name:
            partner = name.replace(".gate_proj.", ".up_proj.")
            units.append(Unit({name: tensor, partner: plain[partner]}))
        elif ".up_proj." not in name:
            units.append(Unit({name: tensor}))
    return units
