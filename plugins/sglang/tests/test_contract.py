"""The engine contract against a real SGLang, on a CPU or on a GPU; skipped where none is installed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_core.backend import Request, Sampling
from miles_core.format import Codec
from miles_core.testing import EngineContract, Limits, tiny_checkpoint, tiny_tokenizer
from miles_sglang import installed
from miles_sglang.build import Choices, assemble
from miles_sglang.engine import SglangEngine
from miles_sglang.link import SglangError

pytestmark = pytest.mark.skipif(installed.version() is None, reason="SGLang is not installed")

#: What SGLang's kernels take: a head of 64, and sizes that are multiples of 128.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
_ON_GPU = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "moe_runner_backend": "triton",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,
}


def gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def engine_for(checkpoint: Path, limits: Limits = Limits(), **arguments: Any) -> SglangEngine:  # noqa: B008
    tokenizer, cuda = tiny_tokenizer(), gpu()
    return assemble(
        checkpoint,
        Codec(),
        lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
        checkpoint.parent / f"log-{checkpoint.name}",
        Choices(
            arguments={"max_total_tokens": 4096, **(_ON_GPU if cuda else {}), **arguments},
            device="cuda" if cuda else "cpu",
            seed=limits.seed,
            max_context=limits.max_context,
            max_running_requests=limits.max_running_requests,
            startup_timeout=300,
        ),
    )


class SglangContract(EngineContract):
    @pytest.fixture(scope="class")
    def checkpoints(self, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        root = tmp_path_factory.mktemp("sglang")
        return [tiny_checkpoint(self.family, root / str(seed), seed, **SIZES) for seed in range(3)]


class TestSglang(SglangContract):
    atol = 0.2 if installed.version() and gpu() else 1e-3
    extra = "rollout_routed_experts"

    async def make(self, checkpoint: Path, limits: Limits) -> SglangEngine:
        return engine_for(checkpoint, limits, enable_return_routed_experts=True)


@pytest.mark.skipif(not gpu(), reason="deterministic inference needs a GPU")
class TestDeterministicSglang(SglangContract):
    family = "qwen3"
    atol = 0.05

    async def make(self, checkpoint: Path, limits: Limits) -> SglangEngine:
        return engine_for(checkpoint, limits, enable_deterministic_inference=True)


def test_a_killed_scheduler_is_noticed_within_seconds(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "model", **SIZES)

    async def killed() -> tuple[str, float]:
        engine = engine_for(checkpoint)
        await engine.start()
        try:
            asking = asyncio.ensure_future(engine.generate(Request([5], Sampling(40, ignore_eos=True))))
            await asyncio.sleep(0.05)
            worker = psutil.Process(engine.link._process.pid)  # type: ignore[attr-defined]
            scheduler = next(p for p in worker.children(recursive=True) if "scheduler" in " ".join(p.cmdline()))
            os.kill(scheduler.pid, signal.SIGKILL)
            started = time.monotonic()
            await asyncio.wait([asking])
            with pytest.raises(SglangError) as failed:
                while True:  # the first request may have been answered already
                    await asyncio.wait_for(engine.generate(Request([5], Sampling(4))), timeout=30)
            return str(failed.value), time.monotonic() - started
        finally:
            await engine.stop()

    said, seconds = asyncio.run(killed())
    assert "SGLang's process ended" in said and seconds < 20
    assert "sglang.log" in said
