"""Updates that are LoRA adapters, on doubles of vLLM and of its HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save
from vllm_double import Process, stand_in_for_vllm
from vllm_server_double import ServerDouble

import miles_vllm
from miles_core.engine import Request, Sampling
from miles_core.plugin import MilesError, PlanError
from miles_formats import Codec
from miles_testing import tiny_checkpoint
from miles_testing.doubles.policies import two_policies
from miles_testing.doubles.server import starting
from miles_vllm import build, process
from miles_vllm.build import Choices, assemble
from miles_vllm.server import Needs, ServerLink
from miles_workers.servers import ServerError, Shared, pool

pytest.importorskip("miles_lora")
pytest.importorskip("peft")

RUN = {"engine": "vllm", "device": "cpu", "lora_sync": "adapter", "lora_target_modules": "all-linear", "lr": 1e-2}
LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
ROOM = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3, "max_cpu_loras": 3, "lora_target_modules": LINEAR}


@pytest.fixture(autouse=True)
def double(monkeypatch: Any) -> None:
    stand_in_for_vllm(monkeypatch)
    monkeypatch.setattr(miles_vllm, "plugin", replace(miles_vllm.plugin, packages=()))
    monkeypatch.setattr(miles_vllm.installed, "version", lambda: "0.32.0")
    monkeypatch.setattr("miles_vllm.review.version", lambda: "0.32.0")
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.02)
    Process.started = []

    def make(launch: process.Launch) -> process.ProcessLink:
        return process.ProcessLink(launch, Process)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "ProcessLink", make)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint("qwen3", tmp_path / "model", 0)


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Callable[..., ServerDouble]]:
    with starting(lambda **arguments: ServerDouble(checkpoint, **{**ROOM, **arguments})) as start:
        yield start


@pytest.fixture
def several(tmp_path: Path, checkpoint: Path, toy_run: Any) -> Any:
    """Runs two trained policies with adapters of different ranks, and one that computes with the base alone."""
    options = two_policies(tmp_path)
    return lambda **more: toy_run(["lora"], hf_checkpoint=checkpoint, **RUN, **options, **more)


def test_only_adapters_travel_and_vllm_applies_the_newest(checkpoint: Path, toy_run: Any) -> None:
    run = toy_run(["lora"], steps=3, hf_checkpoint=checkpoint, verify_logprobs=True, **RUN)
    (process,) = Process.started
    host = process.worker
    (name,) = host._adapters
    assert name.startswith("policy-3-") and run.engine.version == 3 and len(host.llm.loras) == 1
    assert all(step["verify/abs_log_prob"] < 1e-5 for step in run.metrics) and run.metrics[-1]["verify/moved"] > 0.99
    assert run.metrics[-1]["train/lora_delta_norm"] > 0 and run.metrics[-1]["sync/bytes"] < 40_000
    assert {v for sample in run.samples for _, v in sample["weight_versions"]} == {0, 1, 2}
    given = host.llm.arguments
    assert {each: given[each] for each in ROOM} == {**ROOM, "max_loras": 2, "max_cpu_loras": 2}
    assert host.llm.worker.miles_updates.version is None, "the base was not updated"


@pytest.mark.parametrize("schedule", ["sync", pytest.param("async", marks=pytest.mark.thorough)])
def test_policies_share_one_vllm(several: Any, schedule: str) -> None:
    run = several(steps=3, schedule=schedule)
    assert len(Process.started) == 1
    host = Process.started[0].worker
    assert sorted(name.split("-")[0] for name in host._adapters) == ["judge", "solver"]
    assert [part.engine.version for part in run.parts] == [3, 3, 0]
    for name in ("solver", "judge"):
        assert all(step[f"{name}/verify/abs_log_prob"] < 1e-5 for step in run.metrics)


def test_policies_share_servers_that_forget_the_least_recently_used(several: Any, start: Any) -> None:
    """The workers keep adapters of earlier versions until there are too many, and read one again that they have dropped."""
    servers = [start(max_loras=4, max_cpu_loras=4) for _ in range(2)]
    run = several(steps=4, vllm_url=",".join(server.url for server in servers))
    for name in ("solver", "judge"):
        assert all(step[f"{name}/verify/abs_log_prob"] < 1e-5 for step in run.metrics)
        assert run.metrics[-1][f"{name}/sync/bytes"] < 40_000
    for server in servers:
        assert server.calls["v1/load_lora_adapter"] == 11 and not server.calls["pause"]  # 5 versions of 2, and a check
        assert not server.adapters and not server.llm.worker.miles_adapters, "the run has unloaded them at its end"
    assert run.metrics[-1]["vllm/servers"] == 2


def test_a_restart_brings_the_adapter_back(checkpoint: Path, toy_run: Any, monkeypatch: Any) -> None:
    from vllm_double import AsyncLLM

    usual, deaths = AsyncLLM.remove_lora, []

    async def remove_lora(llm: AsyncLLM, lora_id: int) -> bool:
        if not deaths:
            deaths.append(lora_id)
            Process.started[0].dead = True
        return await usual(llm, lora_id)

    monkeypatch.setattr(AsyncLLM, "remove_lora", remove_lora)
    run = toy_run(["lora"], steps=3, hf_checkpoint=checkpoint, verify_logprobs=True, max_restarts=1, **RUN)
    assert len(Process.started) == 2 and run.engine.version == 3
    assert all(step["verify/abs_log_prob"] < 1e-5 for step in run.metrics)


def test_an_adapter_that_vllm_rejects_is_named(start: Any, tmp_path: Path) -> None:
    server = start()
    message = {"adapter": "p", "config": {"r": 16, "lora_alpha": 16}, "tensors": save({})}

    async def play(url: tuple[str, ...]) -> None:
        choices = Choices(device="cpu", adapters=ROOM, url=url, startup_timeout=5)
        engine = assemble(server.checkpoint, Codec(), str, tmp_path, choices, dict[str, Shared[Any]]())
        await engine.start()
        try:
            with pytest.raises(MilesError, match=r"rejected the adapter.*rank 16 is greater than max_lora_rank 8"):
                await engine.receive(message, 1, True)
            assert len((await engine.generate(Request([1], Sampling(4, ignore_eos=True)))).tokens) == 4
            with pytest.raises(MilesError, match="would change the base"):
                await engine.update_weights([], 1)
        finally:
            await engine.stop()

    for url in ((), (server.url,)):
        asyncio.run(play(url))
    assert not server.llm.worker.miles_adapters


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        ({"max_lora_rank": 1}, {}, "max_lora_rank = 1, which is too little for the adapters of this run"),
        ({"lora_target_modules": None}, {}, "lora_target_modules = None, which is too little"),
        ({"enable_lora": False}, {}, "enable_lora = None, which is too little"),
        ({}, {"runtime_adapters": False}, "the server has no route v1/load_lora_adapter"),
    ],
)
def test_a_server_must_have_room_for_the_adapters(start: Any, arguments: Any, changes: Any, said: str) -> None:
    server = start(**arguments)
    vars(server).update(changes)
    command = (
        "start it with VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve model --enable-scale-out .* --enable-lora "
        "--max-lora-rank 8 --max-loras 3 --max-cpu-loras 3 --lora-target-modules down_proj gate_proj"
    )
    with pytest.raises(ServerError, match=f"{said}.*{command}"):
        asyncio.run(ServerLink(server.url, 1.0, Needs("model", adapters=ROOM)).start())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_rank": 513}, "a rank of at most 512"),
        ({"lora_target_modules": "experts.gate_up_proj"}, r"kernels for adapters of experts \(experts.gate_up_proj\)"),
        ({"vllm_url": "http://a:1", "vllm_weights_dir": "/shared"}, "adapters are small, and travel over HTTP"),
        ({"vllm_args": '{"max_loras": 4}'}, "max_loras, which is determined by --lora-sync adapter"),
    ],
)
def test_the_plan_refuses_adapters_that_vllm_does_not_take(plan: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(plugins=["lora"], **{**RUN, **options})
