"""The engine contract against a real vLLM, on a CPU or on a GPU; skipped where none is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_formats import Codec
from miles_testing import EngineContract, Limits, tiny_checkpoint, tiny_tokenizer
from miles_vllm import installed
from miles_vllm.build import Choices, assemble
from miles_vllm.engine import VllmEngine

pytestmark = pytest.mark.skipif(installed.version() is None, reason="vLLM is not installed")

#: What vLLM's kernels take: a head of 64, and sizes that are multiples of 128. vLLM computes ahead of this process, so with fewer layers a
#: response may be complete before it can be aborted.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "head_dim": 64,
    "num_hidden_layers": 12,
}


def gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def engine_for(checkpoint: Path, limits: Limits, **arguments: Any) -> VllmEngine:
    tokenizer = tiny_tokenizer()
    cuda = {"gpu_memory_utilization": 0.1, "enforce_eager": True} if gpu() else {"kv_cache_memory_bytes": 1 << 26}
    choices = Choices(
        arguments={**cuda, **arguments},
        device="cuda" if gpu() else "cpu",
        seed=limits.seed,
        max_context=limits.max_context,
        max_running_requests=limits.max_running_requests,
        startup_timeout=300,
    )

    def detokenize(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return assemble(checkpoint, Codec(), detokenize, checkpoint.parent / f"run-{checkpoint.name}", choices)


class VllmContract(EngineContract):
    pause_modes = ()
    hottest = 2.0
    atol = 0.2 if installed.version() and gpu() else 1e-3

    @pytest.fixture(scope="class")
    def checkpoints(self, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        root = tmp_path_factory.mktemp("vllm")
        return [tiny_checkpoint(self.family, root / str(seed), seed, **SIZES) for seed in range(3)]


class TestVllm(VllmContract):
    family = "qwen3"

    async def make(self, checkpoint: Path, limits: Limits) -> VllmEngine:
        return engine_for(checkpoint, limits, **({"enable_sleep_mode": True} if gpu() else {}))


@pytest.mark.skipif(installed.version() is not None and not gpu(), reason="vLLM 0.32 reloads experts wrongly on a CPU")
class TestExperts(VllmContract):
    extra = "rollout_routed_experts"

    async def make(self, checkpoint: Path, limits: Limits) -> VllmEngine:
        return engine_for(checkpoint, limits, enable_return_routed_experts=True)
