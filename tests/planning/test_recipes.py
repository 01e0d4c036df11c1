"""Published recipes (``benchmarks/recipes.json``): which the plan accepts, and how far estimates are from what was published."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark():
    path = ROOT / "benchmarks"
    sys.path.insert(0, str(path))
    try:
        spec = importlib.util.spec_from_file_location("recipes_plan", path / "recipes_plan.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path))
    return module


@pytest.fixture(scope="module")
def judged(benchmark, tmp_path_factory):
    """Returns a function that judges one recipe, once."""
    rows = {row["id"]: row for row in json.loads(benchmark.RECIPES.read_text(encoding="utf-8"))}
    folder, done = tmp_path_factory.mktemp("models"), {}

    def judge(name):
        if name not in done:
            done[name] = benchmark.judge(rows[name], folder)
        return done[name]

    return judge


@pytest.mark.parametrize(
    "name",
    [
        "slime-qwen3-4b",
        "slime-qwen3-30b-a3b",
        "miles-gpt-oss-20b",
        "verl-qwen2.5-32b-8",
        "verl-gspo-30b",
        "nemo-moonlight-32",
        "verl-deepseek-v3-96",  # an engine on four machines
        "areal-qwen3-235b-80",  # embedding and output layer count as layers
        "roll-qwen3-235b-64",
        "slime-kimi-k2",  # names no GPU: H200s
        "slime-qwen3-30b-fp8",
        "verl-qwen3-30b-8",
    ],
)
def test_a_recipe_that_runs_is_accepted_as_typed(judged, name):
    assert judged(name)["accepted"] is True, judged(name).get("reason")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("miles-glm4.5-355b", "92 layers that divide among 8 pipeline stages"),
        ("verl-qwen3-235b-32", "110 GB on each GPU"),
    ],
)
def test_other_recipes_are_refused_with_the_reason(judged, name, reason):
    assert judged(name)["accepted"] is False and reason in judged(name)["reason"]


def test_a_recipe_without_a_gpu_says_why_h100s_do_not_do(judged):
    found = judged("slime-kimi-k2")
    assert found["gpu"] == "H200" and "an engine that fits the model" in found["refused_on_h100"]


@pytest.mark.parametrize("name", ["verl-deepseek-v3-96", "prime-bench-Qwen3-4B-65536", "prime-bench-Qwen3-0.6B-65536"])
def test_memory_is_within_20_percent_of_published_peaks(judged, name):
    assert judged(name)["memory_ratio"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(
    "name",
    [
        "nemo-dsv3-256",
        "nemo-qwen3-235b-128",
        "nemo-qwen3-235b-256-1off",
        "nemo-qwen3-30b-32-1off",
        "nemo-qwen3-30b-192-8off",
    ],
)
def test_seconds_per_step_are_within_a_factor_of_1_5(judged, name):
    assert 1 / 1.5 <= judged(name)["time_ratio"] <= 1.5


def test_the_saved_result_is_what_the_page_says():
    saved = json.loads((ROOT / "benchmarks/results/recipes_plan-2026-11-24.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    s = saved["summary"]
    assert f"{s['accepted'] + s['refused']}: {s['accepted']} accepted, {s['refused']} refused" in page
    assert f"{s['memory_within_20_percent']} of {s['memory_published']}" in page
    assert f"{s['time_within_factor_1_5']} of {s['time_published']}" in page
    assert max(saved["search_seconds"].values()) < 10
