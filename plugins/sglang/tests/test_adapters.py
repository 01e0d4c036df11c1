"""Updates that are LoRA adapters, on a double of SGLang."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import miles_sglang
from miles_core.plugin import MilesError
from miles_sglang import build

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
    assert list(manager.adapters) == ["policy-3-3"] and run.engine.version == 3
    assert all(step["verify/abs_log_prob"] < 1e-5 for step in run.metrics) and run.metrics[-1]["verify/moved"] > 0.99
    assert run.metrics[-1]["train/lora_delta_norm"] > 0 and run.metrics[-1]["sync/bytes"] < 40_000
    assert {v for sample in run.samples for _, v in sample["weight_versions"]} == {0, 1, 2}
    assert not any((run.directory / "sglang" / "weights").iterdir())
    arguments = double.link.arguments
    assert arguments["enable_lora"] and (arguments["max_lora_rank"], arguments["lora_target_modules"]) == (8, ["all"])


def test_a_restarted_sglang_gets_the_adapter_again(double: types.SimpleNamespace, toy_run: Any) -> None:
    double.fatal[1, "generate"] = 9  # in the second step
    run = toy_run(["lora"], steps=2, max_restarts=1, **RUN)
    assert double.link.starts == 2 and all(step["mismatch/abs_log_prob"] < 1e-5 for step in run.metrics)


def test_a_rejected_adapter_ends_the_run_with_sglangs_reason(double: types.SimpleNamespace, toy_run: Any) -> None:
    double.rank = 4
    with pytest.raises(MilesError, match="rank 8 is too large"):
        toy_run(["lora"], steps=1, **RUN)
