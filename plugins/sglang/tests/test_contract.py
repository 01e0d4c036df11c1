"""The engine contract against a real SGLang, on a CPU or on a GPU; skipped where none is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.format import Codec
from miles_core.testing import EngineContract, Limits, tiny_checkpoint, tiny_tokenizer
from miles_sglang import installed

pytestmark = pytest.mark.skipif(installed.version() is None, reason="SGLang is not installed")

#: What SGLang's kernels take: a head of 64, and sizes that are multiples of 128.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}


class TestSglangEngine(EngineContract):
    atol = 2e-3
    extra = "rollout_routed_experts"

    @pytest.fixture(scope="class")
    def checkpoints(self, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        root = tmp_path_factory.mktemp("sglang")
        return [tiny_checkpoint(self.family, root / str(seed), seed, **SIZES) for seed in range(3)]

    async def make(self, checkpoint: Path, limits: Limits):
        import torch

        from miles_sglang.build import assemble

        tokenizer = tiny_tokenizer()
        return assemble(
            checkpoint,
            Codec(),
            lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
            checkpoint.parent / f"log-{checkpoint.name}",
            arguments={"enable_return_routed_experts": True, "max_total_tokens": 4096},
            device="cuda" if torch.cuda.is_available() else "cpu",
            seed=limits.seed,
            max_context=limits.max_context,
            max_running_requests=limits.max_running_requests,
            startup_timeout=300,
        )
