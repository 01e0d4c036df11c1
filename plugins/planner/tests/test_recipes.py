"""Published recipes (``benchmarks/planning/recipes.json``): which the plan accepts, and how far estimates are from what was published."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def benchmark():
    from benchmarks.planning import recipes_plan

    return recipes_plan


@pytest.fixture(scope="module")
def judged(benchmark, tmp_path_factory):
    """Returns a function that judges one recipe, once."""
    files = (benchmark.RECIPES, benchmark.UNSEEN)
    rows = {row["id"]: row for file in files for row in json.loads(file.read_text(encoding="utf-8"))}
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
        "miles-kimi-k2-512",
        "miles-qwen3-235b-int4",
        "miles-kimi-k2-thinking-int4",  # names no GPU: H200s
        "slime-gpt-oss-20b",
        "skyrl-qwen3-235b-64",
        "verl-deepseek-v3-256-h100",
        "verl-qwen2.5-32b-dapo-128",
        "areal-moonlight-16",
        "openrlhf-r1-distill-1.5b",
        "nemo-qwen3-30b-40k",
    ],
)
def test_a_recipe_that_runs_is_accepted_as_typed(judged, name):
    assert judged(name)["accepted"] is True, judged(name).get("reason")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("miles-glm4.5-355b", "92 layers that divide among 8 pipeline stages"),
        ("verl-qwen3-235b-32", "110 GB on each GPU"),
        ("verl-deepseek-v3-512-dapo", "need 380 GB on each GPU"),
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
        # not seen when the efficiencies were chosen
        "nemo-qwen3-235b-256",
        "nemo-qwen3-30b-32",
        "nemo-dsv3-gb200-128",
        "nemo-dsv3-gb200-256-1off",
        "nemo-qwen3-30b-gb200-16-1off",
        "nemo-llama3.1-8b-16",
        "nemo-llama3.1-8b-16-1off",
        "nemo-qwen3-32b-32-v0.4",
        "nemo-qwen3-32b-64-1off",
    ],
)
def test_seconds_per_step_are_within_a_factor_of_1_5(judged, name):
    assert 1 / 1.5 <= judged(name)["time_ratio"] <= 1.5


def test_the_saved_result_is_what_the_page_says():
    saved = json.loads((ROOT / "benchmarks/results/recipes_plan-2026-11-27.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    for s in (saved["summary"], saved["unseen_summary"]):
        assert f"{s['accepted'] + s['refused']}: {s['accepted']} accepted, {s['refused']} refused" in page
        assert f"{s['time_within_factor_1_5']} of {s['time_published']}" in page
    s = saved["summary"]
    assert f"{s['memory_within_20_percent']} of {s['memory_published']}" in page
    assert max(saved["search_seconds"].values()) < 10


def test_every_recipe_has_a_source_and_is_in_one_file(benchmark):
    rows = [
        row for file in (benchmark.RECIPES, benchmark.UNSEEN) for row in json.loads(file.read_text(encoding="utf-8"))
    ]
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert {"repo", "path", "commit"} <= row["source"].keys() and row["gpu_source"], row["id"]
        assert row["dp"] * row["tp"] * row["pp"] * row["cp"] == row["trainer_gpus"], row["id"]
