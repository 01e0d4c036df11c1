"""Contract tests for engines that receive quantised weights, in addition to ``EngineContract``.

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
from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.mismatch.parity import check, probes
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format
from miles_formats.codec import FormatCodec
from miles_testing.asking import ask
from miles_testing.engine_contract import FREE, GREEDY, PROMPTS, Limits
from miles_testing.stored import stored_units
from miles_testing.tiny import tiny_checkpoint


class QuantizedEngineContract:
    """Subclass it and implement ``format`` and ``make``.

    Attributes:
        family: model family of ``miles_testing.tiny.FAMILIES``.
        sizes: sizes of the tiny model; the format must be able to store every matrix.
        atol: tolerance of log-probabilities of the same tokens between an updated and a newly loaded engine.
    """

    family = "qwen3_moe"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}  # noqa: RUF012
    atol = 1e-4

    def format(self) -> Format:
        """Return the number format."""
        raise NotImplementedError

    async def make(self, checkpoint: Path, limits: Limits, codec: Codec) -> Engine:
        """Make an engine for ``checkpoint``'s architecture that loads weights encoded by ``codec``; do not start it."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def encoded(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Encoded]]]:
        """A checkpoint, and three sets of encoded weights for it."""
        root = tmp_path_factory.mktemp("quantized")
        codec = FormatCodec(self.format())
        paths = [tiny_checkpoint(self.family, root / str(seed), seed, **self.sizes) for seed in range(3)]
        return paths[0], [list(codec.encode(couple_units(path))) for path in paths]

    @pytest.fixture(scope="class")
    def runner(self) -> Iterator[asyncio.Runner]:
        """Event loop of the class."""
        with asyncio.Runner() as runner:
            yield runner

    def test_two_updates_in_place_equal_a_fresh_load(
        self, runner: asyncio.Runner, encoded: tuple[Path, list[list[Encoded]]]
    ) -> None:
        checkpoint, versions = encoded
        engine, fresh = (runner.run(self.start_engine(checkpoint)) for _ in range(2))
        try:
            if engine.hot_update(self.format().name) != "in_place":
                pytest.skip("the engine cannot update weights in this format in place")
            runner.run(engine.update_weights(versions[0], 0))
            first = ask(runner, engine, PROMPTS, GREEDY)
            for version in (1, 2):  # two updates with requests in between, so that stale caches would be detected
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
        engine = runner.run(self.start_engine(encoded[0]))
        try:
            assert {f"format:{format.name}", "format:*"} & engine.capabilities, (
                "the plan refuses a format without a capability"
            )
            check(type(engine).__name__, format, engine.quantizer(format), probes(format))
        finally:
            runner.run(engine.stop())

    async def start_engine(self, checkpoint: Path) -> Engine:
        engine = await self.make(checkpoint, Limits(), FormatCodec(self.format()))
        await engine.start()
        return engine


def couple_units(checkpoint: Path) -> list[WeightUnit]:
    """Return a checkpoint's tensors as units, with gate and up of an expert in one unit."""
    plain = {e.name: e.parts[e.name] for e in stored_units(checkpoint)}
    units = []
    for name, tensor in plain.items():
        if ".gate_proj." in name:
            partner = name.replace(".gate_proj.", ".up_proj.")
            units.append(WeightUnit({name: tensor, partner: plain[partner]}))
        elif ".up_proj." not in name:
            units.append(WeightUnit({name: tensor}))
    return units
