"""Contract tests for engines: abort, pause and resume with requests in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.contracts.engine import Engine, Response, Sampling
from miles_core.errors import MilesError
from miles_testing.asking import ask, start, start_and_wait
from miles_testing.capabilities import skip_without
from miles_testing.stored import stored_units

_FREE = Sampling(10, temperature=0.9, ignore_eos=True)


class Interruptions:
    """Part of ``EngineContract``, which provides the fixtures ``engine``, ``runner`` and ``checkpoints``.

    Attributes:
        atol: see ``EngineContract``.
        extra: see ``EngineContract``.
        pause_modes: modes in which requests continue; an engine with token versions refuses the other one with a MilesError.
    """

    atol = 1e-4
    extra: str | None = None
    pause_modes: tuple[str, ...] = ("retract", "in_place")

    def test_abort_returns_what_there_is(self, engine: Engine, runner: asyncio.Runner) -> None:
        long = Sampling(44, temperature=0.9, ignore_eos=True)

        async def interrupted() -> list[Response]:
            tasks = await start_and_wait(engine, [[5], [3, 4, 5, 6], [7, 8]] + [[5]] * 9, long)
            await engine.abort()
            return await asyncio.gather(*tasks)

        got = runner.run(interrupted())
        assert {r.finish for r in got} <= {"abort", "length"} and "abort" in {r.finish for r in got}
        for response in got:
            assert len(response.tokens) == len(response.log_probs)
            assert response.weight_versions in ([], [(0, engine.version)])
        if "keyed_sampling" in engine.capabilities:
            full = ask(runner, engine, [[5]], long)[0]
            assert full.tokens[: len(got[0].tokens)] == got[0].tokens
        assert len(ask(runner, engine, [[5]], _FREE)[0].tokens) == 10

    def test_abort_of_some_requests_leaves_the_others_alone(self, engine: Engine, runner: asyncio.Runner) -> None:
        long = Sampling(44, temperature=0.9, ignore_eos=True)

        async def interrupted() -> list[Response]:
            tasks = await start_and_wait(engine, [[5]] * 8, long)  # four are decoded at once, the others are queued
            await engine.abort([0, 2, 5, 777])
            return await asyncio.gather(*tasks)

        got = runner.run(interrupted())
        assert [r.finish for r in got] == ["abort" if key in (0, 2, 5) else "length" for key in range(8)]
        if "keyed_sampling" in engine.capabilities:
            alone = ask(runner, engine, [[5]] * 8, long)
            assert [r.tokens for r in got] == [a.tokens[: len(r.tokens)] for a, r in zip(alone, got, strict=True)]

    def test_requests_sent_while_it_is_paused_wait_for_the_new_weights(
        self, engine: Engine, runner: asyncio.Runner, checkpoints: list[Path]
    ) -> None:
        old, long = engine.version, Sampling(44, temperature=0.9, ignore_eos=True)

        async def updated() -> tuple[list[Response], Response]:
            tasks = await start_and_wait(engine, [[5], [6]], long)
            await engine.pause("abort")
            await engine.pause("abort")  # pausing twice has no further effect
            aborted = await asyncio.gather(*tasks)
            (waiting,) = start(engine, [[5, *aborted[0].tokens]], _FREE)
            await engine.update_weights(stored_units(checkpoints[1]), old + 1)
            assert not waiting.done()
            await engine.resume()
            return aborted, await waiting

        aborted, late = runner.run(updated())
        runner.run(engine.update_weights(stored_units(checkpoints[0]), old + 2))
        assert aborted[0].finish == "abort" and 0 < len(aborted[0].tokens) < 44
        assert aborted[0].weight_versions == [(0, old)] and late.weight_versions == [(0, old + 1)]

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    def test_pause_and_resume_across_an_update(
        self, engine: Engine, runner: asyncio.Runner, checkpoints: list[Path], mode: Any
    ) -> None:
        skip_without(engine, "token_versions")
        if mode not in self.pause_modes:
            with pytest.raises(MilesError):
                runner.run(engine.pause(mode))
            return
        old, extras = engine.version, {self.extra} if self.extra else set()
        long = Sampling(40, temperature=0.9, ignore_eos=True)

        async def updated() -> list[Response]:
            tasks = await start_and_wait(engine, [[5], [5], [6], [5], [6]] + [[5]] * 7, long, extras)
            await engine.pause(mode)
            await engine.update_weights(stored_units(checkpoints[1]), old + 1)
            await engine.resume()
            return await asyncio.gather(*tasks)

        got = runner.run(updated())
        runner.run(engine.update_weights(stored_units(checkpoints[0]), old + 2))
        assert all(len(r.tokens) == len(r.log_probs) == 40 for r in got)
        mixed = [r for r in got if len(r.weight_versions) == 2]
        assert mixed
        for response in mixed:
            (first, before), (index, after) = response.weight_versions
            assert (first, before, after) == (0, old, old + 1) and 0 < index < 40
            if self.extra:
                assert len(response.extras[self.extra]) == 1 + 40 - 1
        if mode == "retract":
            self._check_retracted(runner, engine, checkpoints, mixed[0])

    def _check_retracted(
        self, runner: asyncio.Runner, engine: Engine, checkpoints: list[Path], response: Response
    ) -> None:
        """Check that after a retract all log-probs are those of the new weights."""
        if not {"score", "score_temperature"} <= engine.capabilities:
            return
        index = response.weight_versions[1][0]
        runner.run(engine.update_weights(stored_units(checkpoints[1]), engine.version + 1))
        candidates = runner.run(engine.score([[p, *response.tokens] for p in (5, 6)], 0.9))
        runner.run(engine.update_weights(stored_units(checkpoints[0]), engine.version + 1))
        gaps = [np.abs(row[index:] - response.log_probs[index:]).max() for row in candidates]
        assert min(gaps) < self.atol
