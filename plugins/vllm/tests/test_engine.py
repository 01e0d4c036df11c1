"""The engine contract on a double of vLLM, and what a real vLLM cannot be made to do on demand."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_double import Process, stand_in_for_vllm

from miles_core.engine import Request, Sampling
from miles_core.plugin import MilesError, MismatchError, SyncError, WorkerLost
from miles_formats import Codec
from miles_testing import EngineContract, Limits, tiny_checkpoint, tiny_tokenizer
from miles_testing.engine_contract import stored_units
from miles_testing.stored import buckets
from miles_vllm.build import Choices, assemble
from miles_vllm.engine import VllmEngine
from miles_vllm.process import ProcessLink
from miles_workers import EngineLost

GREEDY = Request([5, 6, 7], Sampling(8, temperature=0.0, ignore_eos=True))


def engine_for(checkpoint: Path, limits: Limits = Limits(), **changes: Any) -> VllmEngine:  # noqa: B008
    tokenizer = tiny_tokenizer()
    choices = Choices(
        device="cpu",
        seed=limits.seed,
        max_context=limits.max_context,
        max_running_requests=limits.max_running_requests,
        bucket_bytes=1 << 16,  # several buckets
        **changes,
    )

    def detokenize(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    engine = assemble(checkpoint, Codec(), detokenize, checkpoint.parent / f"run-{checkpoint.name}", choices)
    assert isinstance(engine.link, ProcessLink)
    engine.link.start_process = Process  # type: ignore[assignment]
    return engine


@pytest.fixture(scope="module", autouse=True)
def double() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_vllm(patch)
        Process.started = []
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("vllm")
    return [tiny_checkpoint("qwen3", root / str(seed), seed) for seed in range(2)]


class TestDouble(EngineContract):
    family = "qwen3"
    pause_modes = ()
    hottest = 2.0

    async def make(self, checkpoint: Path, limits: Limits) -> VllmEngine:
        return engine_for(checkpoint, limits, arguments={"enable_sleep_mode": True})


def run(checkpoint: Path, use: Any, **changes: Any) -> Any:
    """Start an engine with the weights of the checkpoint as version 0, and call ``use`` with it."""

    async def main() -> Any:
        engine = engine_for(checkpoint, **changes)
        await engine.start()
        try:
            await engine.update_weights(stored_units(checkpoint), 0)
            return await use(engine)
        finally:
            await engine.stop()

    return asyncio.run(main())


def test_cached_prefixes_are_dropped_once_per_update(checkpoints: list[Path]) -> None:
    async def use(engine: VllmEngine) -> int:
        return int(engine.link._process.worker.llm.prefix_resets)  # type: ignore[attr-defined]

    assert run(checkpoints[0], use) == 1


def test_a_dead_vllm_is_replaced_and_has_the_current_weights(checkpoints: list[Path]) -> None:
    async def use(engine: VllmEngine) -> tuple[Any, Any, int]:
        async def resend() -> None:
            await engine.update_weights(stored_units(checkpoints[1]), 1)

        await engine.update_weights(stored_units(checkpoints[1]), 1)
        engine.resend = resend
        before, started = await engine.generate(GREEDY), len(Process.started)
        long = Request([5, 6, 7], Sampling(40, temperature=0.0, ignore_eos=True))
        task = asyncio.ensure_future(engine.generate(long))
        await asyncio.sleep(0.02)
        Process.started[-1].dead = True
        return before, await task, len(Process.started) - started

    before, after, starts = run(checkpoints[0], use, max_restarts=1)
    assert after.tokens[:8] == before.tokens and after.weight_versions == [(0, 1)] and starts == 1


def test_a_death_without_restarts_ends_the_engine(checkpoints: list[Path]) -> None:
    async def use(engine: VllmEngine) -> None:
        Process.started[-1].dead = True
        with pytest.raises(WorkerLost, match="exit status 1"):
            await engine.generate(GREEDY)

    run(checkpoints[0], use)


def test_a_death_during_an_update_is_a_failed_sync_and_the_next_one_restarts(checkpoints: list[Path]) -> None:
    async def use(engine: VllmEngine) -> Any:
        async def resend() -> None:
            raise AssertionError("the next update sends the weights")

        engine.resend = resend
        units = stored_units(checkpoints[0])

        def dying() -> Iterator[Any]:
            for number, unit in enumerate(units):
                Process.started[-1].dead = number > len(units) // 2
                yield unit

        with pytest.raises(SyncError, match="died while it loaded version 1"):
            await engine.update_weights(dying(), 1)
        with pytest.raises(MilesError, match="incomplete"):
            await engine.generate(GREEDY)
        await engine.update_weights(units, 1)
        return await engine.generate(GREEDY)

    assert run(checkpoints[0], use, max_restarts=1).weight_versions == [(0, 1)]


@pytest.mark.parametrize("allowed", [False, True])
def test_a_parameter_that_no_update_reaches_is_named(checkpoints: list[Path], allowed: bool, caplog: Any) -> None:
    async def main() -> None:
        engine = engine_for(checkpoints[0], allow_mismatch=allowed)
        await engine.start()
        import torch

        model = engine.link._process.worker.llm.worker.model  # type: ignore[attr-defined]
        model.extra = torch.nn.Parameter(torch.ones(4))
        await engine.update_weights(stored_units(checkpoints[0]), 0)

    if allowed:
        asyncio.run(main())
        assert "did not reach extra" in caplog.text
        return
    with pytest.raises(MismatchError, match="did not reach extra"):
        asyncio.run(main())


def test_a_staged_version_is_served_after_the_switch(checkpoints: list[Path]) -> None:
    async def use(engine: VllmEngine) -> tuple[Any, ...]:
        before = await engine.generate(GREEDY)
        staged = [{**message, "staged": True} for message in buckets(checkpoints[1])]
        for message in staged:
            await engine.receive(message, 1, message is staged[-1])
        during = await engine.generate(GREEDY)
        await engine.receive({"switch": True}, 1, True)
        return before, during, await engine.generate(GREEDY)

    before, during, after = run(checkpoints[0], use)
    assert during.tokens == before.tokens and during.weight_versions == [(0, 0)]
    assert after.tokens != before.tokens and after.weight_versions == [(0, 1)]


def test_a_broadcast_is_refused_so_that_the_sender_takes_another_path(checkpoints: list[Path]) -> None:
    async def use(engine: VllmEngine) -> None:
        message = {**buckets(checkpoints[1])[0], "memory": {"kind": "broadcast"}}
        with pytest.raises(SyncError, match="shared memory"):
            await engine.receive(message, 1, False)

    run(checkpoints[0], use)


def test_parts_sleep_and_wake_in_vllms_terms(checkpoints: list[Path]) -> None:
    """vLLM releases everything at once: level 1 keeps the weights in host memory, level 2 does not, and after it the weights wake first."""

    async def use(engine: VllmEngine) -> list[Any]:
        await engine.sleep(["cache"])
        await engine.sleep(["cache"])
        await engine.sleep(["weights"])
        await engine.wake(["weights"])
        await engine.wake()
        await engine.sleep(["weights"])
        await engine.wake(["weights"])
        await engine.sleep(["weights", "cache"])
        await engine.wake(["cache"])
        await engine.wake(["weights"])
        return engine.link._process.worker.llm.slept  # type: ignore[attr-defined,no-any-return]

    slept = run(checkpoints[0], use, arguments={"enable_sleep_mode": True})
    both = [2, ["kv_cache", "weights"]]
    assert slept == [1, ["weights"], ["kv_cache"], 2, ["weights"], ["kv_cache"], *both, *both]


def test_a_vllm_that_does_not_start_is_one_error(checkpoints: list[Path], monkeypatch: Any) -> None:
    def fails(arguments: Any) -> None:
        raise ValueError("no such attention backend")

    monkeypatch.setattr(sys.modules["vllm.v1.engine.async_llm"].AsyncLLM, "from_engine_args", fails)
    with pytest.raises(EngineLost, match="vLLM did not start: ValueError: no such attention backend"):
        asyncio.run(engine_for(checkpoints[0]).start())


def test_a_temperature_above_vllms_limit_is_refused(checkpoints: list[Path]) -> None:
    async def use(engine: VllmEngine) -> None:
        with pytest.raises(MilesError, match="up to 2, not 3"):
            await engine.generate(Request([5], Sampling(8, temperature=3.0)))

    run(checkpoints[0], use)
