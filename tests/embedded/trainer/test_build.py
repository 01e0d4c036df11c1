"""A run without optimizer steps has a trainer without optimizer, whose model is not on the engine's device."""

from types import SimpleNamespace

import pytest
import torch

from miles_core.plugin import Policy
from miles_embedded.trainer import build


def run_with(monkeypatch, dtype="auto", device="auto", transport="copy", model="transformers", gpu=True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config = SimpleNamespace(
        model=SimpleNamespace(dtype=dtype, device=device), run=SimpleNamespace(transport=transport)
    )
    hooks = SimpleNamespace(find_provided=lambda kind: (model,))
    return SimpleNamespace(config=config, hooks=hooks, config_of=lambda policy: config)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "bfloat16"), ("float32", "float32"), ("float16", "float16")])
def test_the_model_is_on_the_host_in_the_dtype_of_the_device(monkeypatch, dtype, expected):
    found = build.host_policy(run_with(monkeypatch, dtype), Policy(name="one", options={"lr": 0.1}))
    assert found.options == {"lr": 0.1, "model.device": "cpu", "model.dtype": expected} and found.name == "one"


@pytest.mark.parametrize(
    "different", [{"gpu": False}, {"device": "cpu"}, {"transport": "shared"}, {"model": "another"}]
)
def test_a_model_that_may_be_shared_stays(monkeypatch, different):
    policy = Policy()
    assert build.host_policy(run_with(monkeypatch, **different), policy) is policy


@pytest.mark.parametrize(("steps", "data", "follow"), [(0, None, False), (0, "pairs.jsonl", True), (1, None, True)])
def test_a_warm_start_is_a_step(steps, data, follow):
    config = SimpleNamespace(rollout=SimpleNamespace(num_rollout=steps), sft=SimpleNamespace(data=data))
    assert build.steps_follow(config) is follow
