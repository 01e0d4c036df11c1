"""The engine contract against a real SGLang, on a CPU or on a GPU; skipped where none is installed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from miles_core.data import WeightUnit
from miles_core.engine import Request, Sampling
from miles_core.plugin import MilesError
from miles_formats import Codec, FormatCodec
from miles_sglang import installed
from miles_sglang.build import assemble
from miles_sglang.choices import Choices
from miles_sglang.engine import SglangEngine
from miles_testing import EngineContract, Limits, tiny_checkpoint, tiny_tokenizer
from miles_testing.engine_contract import stored_units

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


def engine_for(
    checkpoint: Path,
    limits: Limits = Limits(),  # noqa: B008
    max_restarts: int = 0,
    codec: Codec | None = None,
    codec_of: Callable[[str], Codec] | None = None,
    **arguments: Any,
) -> SglangEngine:
    tokenizer, cuda = tiny_tokenizer(), gpu()
    return assemble(
        checkpoint,
        codec or Codec(),
        lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
        checkpoint.parent / f"log-{checkpoint.name}",
        Choices(
            arguments={"max_total_tokens": 4096, **(_ON_GPU if cuda else {}), **arguments},
            device="cuda" if cuda else "cpu",
            dtype="bfloat16" if codec or codec_of else "auto",
            seed=limits.seed,
            max_context=limits.max_context,
            max_running_requests=limits.max_running_requests,
            startup_timeout=300,
            max_restarts=max_restarts,
        ),
        codec_of=codec_of,
    )


class SglangContract(EngineContract):
    pause_modes = ("retract",)

    @pytest.fixture(scope="class")
    def checkpoints(self, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        root = tmp_path_factory.mktemp("sglang")
        return [tiny_checkpoint(self.family, root / str(seed), seed, **SIZES) for seed in range(3)]


class TestSglang(SglangContract):
    atol = 0.2 if installed.version() and gpu() else 1e-3
    extra = "rollout_routed_experts"

    async def make(self, checkpoint: Path, limits: Limits) -> SglangEngine:
        return engine_for(checkpoint, limits, enable_return_routed_experts=True)

    def test_a_recorded_field_has_a_row_for_every_token_but_the_last(self, engine: Any, runner: Any) -> None:
        """The records are read from files of SGLang's scheduler, and the files are removed."""
        reader = engine.link._records
        with mock.patch.object(reader, "_take", wraps=reader._take) as taken:
            super().test_a_recorded_field_has_a_row_for_every_token_but_the_last(engine, runner)
        assert taken.call_count > 5 and not list(reader.directory.iterdir())

    @pytest.mark.thorough  # starts a second SGLang
    def test_two_updates_equal_a_fresh_load(self, engine: Any, runner: Any, checkpoints: list[Path]) -> None:
        super().test_two_updates_equal_a_fresh_load(engine, runner, checkpoints)


@pytest.mark.skipif(not gpu(), reason="deterministic inference needs a GPU")
class TestDeterministicSglang(SglangContract):
    family = "qwen3"
    atol = 0.05

    async def make(self, checkpoint: Path, limits: Limits) -> SglangEngine:
        return engine_for(checkpoint, limits, enable_deterministic_inference=True)


@pytest.mark.thorough
def test_a_killed_scheduler_is_replaced_and_has_the_current_weights(tmp_path: Path, caplog: Any) -> None:
    """Not those of the checkpoint it is started from; requests in flight are answered by the new one."""
    first, current = (tiny_checkpoint("qwen3", tmp_path / name, seed, **SIZES) for seed, name in enumerate("ab"))
    greedy = Request([5, 6, 7], Sampling(8, temperature=0.0, ignore_eos=True))
    found: dict[str, float] = {}

    async def killed() -> tuple[Any, Any, list[Any]]:
        engine = engine_for(first, Limits(max_context=512), max_restarts=1)

        async def resend() -> None:
            found["noticed"] = time.monotonic() - started
            await engine.update_weights(stored_units(current), 7)

        engine.resend = resend
        await engine.start()
        try:
            await engine.update_weights(stored_units(current), 7)
            before = await engine.generate(greedy)
            requests = [Request([5, key], Sampling(400, ignore_eos=True), key=key) for key in range(2, 10)]
            asked = [asyncio.ensure_future(engine.generate(request)) for request in requests]
            await asyncio.sleep(0.05)
            worker = psutil.Process(engine.link._process.pid)  # type: ignore[attr-defined]
            scheduler = next(p for p in worker.children(recursive=True) if "scheduler" in " ".join(p.cmdline()))
            os.kill(scheduler.pid, signal.SIGKILL)
            started = time.monotonic()
            return before, await engine.generate(greedy), list(await asyncio.gather(*asked))
        finally:
            await engine.stop()

    before, after, answers = asyncio.run(killed())
    assert "worker sglang was lost: SGLang's process ended" in caplog.text and "sglang.log" in caplog.text
    print(f"the new one was up {found['noticed']:.1f} s after the kill")
    assert after.weight_versions == [(0, 7)]
    assert max(abs(a - b) for a, b in zip(before.log_probs, after.log_probs, strict=True)) < 0.2
    assert all(len(answer.tokens) == 400 and answer.finish == "length" for answer in answers)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("format", "family", "warm_up"),
    [
        ("fp8", "qwen3", False),
        ("fp8", "qwen3", True),
        ("fp8", "llama", False),
        ("fp8", "qwen3_moe", False),
        ("int4", "qwen3", False),
        ("int4", "qwen3_moe", False),
    ],
)
def test_what_it_computes_with_are_the_codes_it_was_sent(
    format: str, family: str, warm_up: bool, tmp_path: Path, quantized_layers: Callable[[str], None]
) -> None:
    """Three updates, the later of which are loaded by remembered copies or packed again, against Transformers with the numbers that the codes
    stand for; SGLang is not restarted. With a warm-up, after an update in BF16 and the change to FP8."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from miles_fp8.format import Fp8
    from miles_int4.format import Int4

    quantized_layers(format)
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoints = [tiny_checkpoint(family, tmp_path / str(seed), seed, **sizes) for seed in range(3)]
    codec, sequence = FormatCodec(Fp8() if format == "fp8" else Int4(64)), list(range(5, 45))

    def encoded(checkpoint: Path) -> list[Any]:
        return list(codec.encode(WeightUnit(dict(unit.parts)) for unit in stored_units(checkpoint)))

    async def scored() -> list[Any]:
        started = {"codec_of": {"fp8": codec}.__getitem__} if warm_up else {"codec": codec}
        engine = engine_for(checkpoints[0], Limits(max_context=512), **started)
        await engine.start()
        try:
            if warm_up:
                await engine.update_weights(stored_units(checkpoints[1]), 0)
                plain = (await engine.score([sequence]))[0]
                await engine.rebuild("fp8")
                with pytest.raises(MilesError, match="weights are incomplete"):
                    await engine.score([sequence])
            found, process = [], engine.link._process  # type: ignore[attr-defined]
            for version, checkpoint in enumerate(checkpoints):
                await engine.update_weights(encoded(checkpoint), version)
                found.append((await engine.score([sequence]))[0])
            assert engine.link._process is process  # type: ignore[attr-defined]
            assert not warm_up or 0 < abs(found[1] - plain).mean() < 1  # the same weights, rounded
            return found
        finally:
            await engine.stop()

    for checkpoint, found in zip(checkpoints, asyncio.run(scored()), strict=True):
        units, decoded = encoded(checkpoint), tmp_path / f"decoded-{checkpoint.name}"
        shutil.copytree(checkpoint, decoded)
        save_file({unit.name: codec.decode(unit).contiguous() for unit in units}, decoded / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([sequence[:-1]])).logits[0].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        assert any(unit.format for unit in units)
        # BF16 noise; where it sends a token to another expert, a few are further away
        assert (torch.from_numpy(found) - expected).abs().quantile(0.8) < 0.1


@pytest.mark.thorough
@pytest.mark.skipif(gpu(), reason="starts both parts on a CPU")
def test_parts_on_two_machines_are_one_engine(tmp_path, monkeypatch):
    """Two SGLang processes with one tensor-parallel rank each, as on two machines, give the tokens and log-probs of one."""
    import socket

    checkpoints = [tiny_checkpoint("qwen3_moe", tmp_path / str(seed), seed, **SIZES) for seed in range(2)]
    request = Request(list(range(3, 20)), Sampling(temperature=0.0, max_new_tokens=12))

    async def answers(*parts: SglangEngine) -> list[tuple[list[int], list[float]]]:
        await asyncio.gather(*(part.start() for part in parts))
        found = []
        for version, checkpoint in enumerate(checkpoints):
            await parts[0].pause()
            await parts[0].update_weights(stored_units(checkpoint), version)
            await parts[0].resume()
            response = await parts[0].generate(request)
            found.append((response.tokens, response.log_probs))
        await asyncio.gather(*(part.stop() for part in parts))
        return found

    alone = asyncio.run(answers(engine_for(checkpoints[0])))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # more tensor-parallel ranks than NUMA nodes
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    parts = [engine_for(checkpoints[0], tp_size=2) for _ in range(2)]
    for index, part in enumerate(parts):
        part.span(2, index, address)
    spread = asyncio.run(answers(*parts))
    for (tokens, log_probs), (expected, wanted) in zip(spread, alone, strict=True):
        assert tokens == expected
        assert log_probs == pytest.approx(wanted, abs=1e-3)
