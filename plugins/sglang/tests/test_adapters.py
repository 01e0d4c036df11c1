"""Updates that are LoRA adapters, on a double of SGLang."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

import miles_sglang
from miles_core.engine import Request, Sampling
from miles_core.plugin import MilesError, PlanError
from miles_formats import Codec
from miles_sglang import build, review
from miles_sglang.choices import Choices
from miles_sglang.engine import SglangEngine
from miles_sglang.link import Link
from miles_testing import tiny_checkpoint
from miles_testing.doubles.policies import two_policies
from miles_workers.servers import Shared

pytest.importorskip("miles_lora")
pytest.importorskip("peft")

from sglang_double import DoubleLink, stand_in_for_sglang

RUN = {"engine": "sglang", "device": "cpu", "lora_sync": "adapter", "lora_target_modules": "all-linear", "lr": 1e-2}


@pytest.fixture
def double(monkeypatch: Any) -> types.SimpleNamespace:
    stand_in_for_sglang(monkeypatch)
    monkeypatch.setattr(miles_sglang, "plugin", replace(miles_sglang.plugin, packages=()))
    made = types.SimpleNamespace(link=None, fatal={}, rank=0)

    def make(arguments: Mapping[str, Any], *_: Any, **__: Any) -> DoubleLink:
        made.link = DoubleLink(
            Path(arguments["model_path"]), {**arguments, **({"max_lora_rank": made.rank} if made.rank else {})}
        )
        made.link.fatal = made.fatal
        return made.link

    monkeypatch.setattr(build, "ProcessLink", make)
    return made


def test_only_adapters_travel_and_sglang_applies_the_newest(double: types.SimpleNamespace, toy_run: Any) -> None:
    run = toy_run(["lora"], steps=3, verify_logprobs=True, **RUN)
    calls, manager = double.link.calls, double.link.manager
    assert (calls["load_lora_adapter"], calls["unload_lora_adapter"], calls["update_weights_from_tensor"]) == (4, 3, 0)
    (name,) = manager.adapters
    assert name.startswith("policy-3-") and run.engine.version == 3
    assert all(step["verify/abs_log_prob"] < 1e-5 for step in run.metrics) and run.metrics[-1]["verify/moved"] > 0.99
    assert run.metrics[-1]["train/lora_delta_norm"] > 0 and run.metrics[-1]["sync/bytes"] < 40_000
    assert {v for sample in run.samples for _, v in sample["weight_versions"]} == {0, 1, 2}
    assert not any((run.directory / "sglang" / "weights").iterdir())
    arguments = double.link.arguments
    assert arguments["enable_lora"] and (arguments["max_lora_rank"], arguments["lora_target_modules"]) == (8, ["all"])


@pytest.mark.parametrize("more", [{}, {"lora_use_rslora": True}])
def test_adapters_of_experts_arrive(
    double: types.SimpleNamespace, toy_run: Any, monkeypatch: Any, more: dict[str, Any]
) -> None:
    """The double loads adapters as SGLang does, a pair per expert, and its log-probabilities are those of the trainer."""
    monkeypatch.setattr(review, "_has_gpu", lambda facts: True)
    options = {**RUN, **more, "family": "qwen3_moe", "lora_target_modules": "all-experts", "lora_rank": 3}
    run = toy_run(["lora"], steps=2, verify_logprobs=True, **options)
    arguments = double.link.arguments
    assert arguments["lora_target_modules"] == ["down_proj", "gate_up_proj"]
    assert arguments["moe_runner_backend"] == "triton"
    assert all(step["verify/abs_log_prob"] < 1e-5 for step in run.metrics) and run.metrics[-1]["verify/moved"] > 0.99
    assert run.metrics[-1]["train/lora_delta_norm"] > 0.05


@pytest.fixture
def several(tmp_path: Path, toy_run: Any) -> Any:
    """Runs two trained policies with adapters of different ranks, and one that computes with the base alone."""
    options = two_policies(tmp_path)
    return lambda **more: toy_run(["lora"], **RUN, **options, **more)


def test_policies_share_one_sglang(double: types.SimpleNamespace, several: Any) -> None:
    run = several(steps=3)
    calls, arguments = double.link.calls, double.link.arguments
    assert (double.link.starts, double.link.stops) == (1, 1)
    assert (calls["load_lora_adapter"], calls["unload_lora_adapter"], calls["pause_generation"]) == (8, 6, 0)
    assert [part.engine.version for part in run.parts] == [3, 3, 0]
    assert (arguments["max_lora_rank"], arguments["max_loaded_loras"]) == (8, 4)
    for step in run.metrics:
        assert max(step[f"{name}/mismatch/abs_log_prob"] for name in ("solver", "judge")) < 1e-5
        assert step["judge/sync/bytes"] > step["solver/sync/bytes"] > 0
    assert run.metrics[-1]["solver/verify/moved"] > 0.99
    found = {(sample["policy"], v) for sample in run.samples for _, v in sample["weight_versions"]}
    assert found == {(name, v) for name in ("solver", "judge") for v in (0, 1, 2)}


def test_all_policies_survive_a_restart_of_their_sglang(double: types.SimpleNamespace, several: Any) -> None:
    double.fatal[1, "generate"] = 25  # in the second step
    run = several(steps=3, max_restarts=1)
    assert (double.link.starts, double.link.stops) == (2, 1)
    assert all(step[f"{name}/mismatch/abs_log_prob"] < 1e-5 for step in run.metrics for name in ("solver", "judge"))


def test_a_sync_of_one_policy_leaves_the_requests_of_another(double: types.SimpleNamespace, tmp_path: Path) -> None:
    """Two engines over one SGLang: one generates while the other aborts, is paused and receives an adapter; then an adapter is missing."""
    checkpoint, servers = tiny_checkpoint("qwen3", tmp_path / "model"), dict[str, Shared[Link]]()
    loras = {"enable_lora": True, "max_lora_rank": 4, "max_loaded_loras": 3}

    def make() -> SglangEngine:
        choices = Choices(arguments=loras, device="cpu", max_context=120, max_running_requests=8)
        return build.assemble(checkpoint, Codec(), str, tmp_path / "work", choices, shared=servers)

    def message(name: str, rank: int = 4) -> dict[str, Any]:
        layer, scale = "base_model.model.model.layers.0.self_attn.q_proj", len(name)
        shape = load_file(checkpoint / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].shape
        tensors = {"A": torch.ones(rank, shape[1]) * scale, "B": torch.ones(shape[0], rank)}
        data = save({f"{layer}.lora_{letter}.weight": tensor for letter, tensor in tensors.items()})
        return {"adapter": name, "config": {"r": rank, "lora_alpha": 8}, "tensors": data}

    async def play() -> None:
        one, two = make(), make()
        assert one.link is not two.link and len(servers) == 1
        await asyncio.gather(one.start(), two.start())
        await one.receive(message("solver"), 0, True)
        await two.receive(message("judge"), 0, True)
        request = Request([1, 2, 3], Sampling(100, ignore_eos=True), key=1)
        long, other = asyncio.create_task(one.generate(request)), asyncio.create_task(two.generate(request))
        await asyncio.sleep(0.05)
        assert not long.done() and not other.done()
        await two.pause("abort")
        assert (await other).finish == "abort"
        await two.receive(message("judge"), 1, True)
        with pytest.raises(MilesError, match="rank 8 is too large"):
            await two.receive(message("judge", rank=8), 2, True)
        await two.resume()
        assert not long.done() and (one.version, two.version) == (0, 1)
        answers = [await long, await two.generate(request)]
        assert [answer.finish for answer in answers] == ["length", "length"]
        assert [answer.weight_versions for answer in answers] == [[(0, 0)], [(0, 1)]]
        assert answers[0].tokens != answers[1].tokens
        await double.link.call("unload_lora_adapter", {"lora_name": next(iter(double.link.manager.adapters))})
        with pytest.raises(MilesError, match="Got LoRA adapter that has never been loaded: solver-0-"):
            await one.generate(request)
        with pytest.raises(MilesError, match="would change the base, which all adapters of this SGLang share"):
            await one.link.call("update_weights_from_disk", {})
        await one.stop()
        assert double.link.stops == 0 and (await two.generate(request)).tokens == answers[1].tokens
        await two.stop()
        assert double.link.stops == 1

    asyncio.run(play())


def test_a_restarted_sglang_gets_the_adapter_again(double: types.SimpleNamespace, toy_run: Any) -> None:
    double.fatal[1, "generate"] = 9  # in the second step
    run = toy_run(["lora"], steps=2, max_restarts=1, **RUN)
    assert double.link.starts == 2 and all(step["mismatch/abs_log_prob"] < 1e-5 for step in run.metrics)


def test_a_rejected_adapter_ends_the_run_with_sglangs_reason(double: types.SimpleNamespace, toy_run: Any) -> None:
    double.rank = 4
    with pytest.raises(MilesError, match="rank 8 is too large"):
        toy_run(["lora"], steps=1, **RUN)


@pytest.mark.parametrize(
    ("targets", "needed"),
    [
        ("q_proj", "q_proj,v_proj"),
        ("k_proj,v_proj", "q_proj,v_proj"),
        ("up_proj,down_proj", "gate_proj"),
        ("gate_proj,o_proj", ""),
    ],
)
def test_adapters_of_parts_that_sglang_joins(
    double: types.SimpleNamespace, plan: Any, targets: str, needed: str
) -> None:
    options = {**RUN, "lora_target_modules": targets, "family": "qwen3"}
    refused = pytest.raises(PlanError, match=f"{needed} in --lora-target-modules") if needed else nullcontext()
    with refused:
        plan(plugins=["lora"], **options)
    whole = plan(plugins=["lora"], **{**options, "lora_sync": "merged"})  # SGLang then receives whole weights
    assert whole.holds("transport == copy")


def test_an_encoded_base_must_be_in_the_checkpoint(double: types.SimpleNamespace, plan: Any) -> None:
    encoded = {"train_precision": "int4", "rollout_precision": "int4", "device": "cuda", "family": "qwen3"}
    facts = ["gpu.count=1", "gpu.sm=90", "gpu.memory_gb=80"]
    with pytest.raises(PlanError, match=r"convert the checkpoint \(miles convert"):
        plan(plugins=["lora", "int4"], facts=facts, **{**RUN, **encoded})
