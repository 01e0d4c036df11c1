"""The comparison with published runs: how it reads what was published, and its saved errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def published():
    from benchmarks.planning import simulate_published

    return simulate_published


def find(published, family, name):
    return next(row for row in published.ROWS if (row.family, row.name) == (family, name))


@pytest.mark.parametrize(
    ("family", "name", "limit", "rate"),
    [
        ("NeMo DSV3", "256 shared, sync", 1536, 12.1),
        ("NeMo DSV3", "512 shared, sync", 1536, 7.24),
        ("NeMo DSV3", "256+256, 1-off", 1536, 12.8),
        ("NeMo 235B", "128 shared, sync", 8192, 58.9),
        ("NeMo 235B", "256 shared, sync", 8192, 37.4),
        (
            "NeMo 235B",
            "128+128, 1-off",
            8192,
            58.7 * 199 / 231,
        ),  # the rate and the seconds contradict each other: docs/simulation.md
        ("NeMo 30B", "32 shared, sync", 4096, 1102),
        ("NeMo 30B", "16+16, 1-off", 4096, 1414),
        ("NeMo 30B", "64+128, 8-off", 4096, 1025),
    ],
)
def test_rows_have_the_published_tokens(published, family, name, limit, rate):
    """The table publishes the limit of a sequence, and tokens per second and GPU beside the seconds of a step."""
    row = find(published, family, name)
    assert row.longest + published.PROMPT == limit
    gpus = row.split[0] if row.shared else sum(row.split)
    assert row.tokens / row.seconds / gpus == pytest.approx(rate, rel=0.02)


def test_lengths_have_the_published_mean_below_the_limit(published):
    for row in published.ROWS:
        median = published.median_of(row.mean, row.longest)
        assert published.mean_of(median, row.longest) == pytest.approx(row.mean, rel=1e-6)


def test_verl_lengths_come_from_the_seconds_of_its_updates(published):
    row = find(published, "verl 7B 32 H20", "16+16, async")
    active = published.shape_of(published.MODELS["qwen2.5-7b"]).active
    operations = 6 * active * row.tokens
    assert operations / (16 * 269.80 * 148e12) == pytest.approx(0.40)


def test_padding_counts_bubbles_and_whole_micro_batches(published):
    row = find(published, "NeMo DSV3", "256 shared, sync")
    row = replace(row, mean=row.longest, pipeline=(4, 64))  # 512 full sequences: 8 per replica
    assert row.padding == pytest.approx((8 + 3) / 8)
    assert replace(row, optimizer_batch=544).padding == pytest.approx((9 + 3) / 8.5)
    assert replace(row, train=1.0).padding == 1.0  # published seconds include them


def test_saved_result_has_all_rows_and_the_documented_errors(published):
    saved = sorted((ROOT / "benchmarks/results").glob("simulate_published-*.json"))[-1]
    rows = json.loads(saved.read_text(encoding="utf-8"))["rows"]
    assert [(row["family"], row["row"]) for row in rows] == [(row.family, row.name) for row in published.ROWS]
    text = (ROOT / "docs/simulation.md").read_text(encoding="utf-8")
    for row in rows:
        line = next(line for line in text.splitlines() if line.startswith(f"| {row['family']} | {row['row']} |"))
        assert [cell.strip() for cell in line.split("|")[3:6]] == [
            f"{row['published']:g}",
            f"{row['simulated']:g}",
            f"{100 * row['error']:+.0f}%",
        ]
