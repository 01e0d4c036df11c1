"""Every family of the table: engine and trainer against Transformers' own code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles_core.errors import PlanError
from miles_core.plugin.detect import config_facts
from miles_core.plugin.facts import Facts
from miles_core.testing import plan
from miles_embedded.engine.self_check import self_check
from miles_embedded.manifest import REFUSED, review
from miles_embedded.model.load import load_model
from miles_embedded.testing.families import FAMILIES, compare, family_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_transformers_computes(family, tmp_path, monkeypatch):
    """By either way to attend on a CPU; every other family with recomputed activations."""
    number = list(FAMILIES).index(family)
    monkeypatch.setattr("miles_embedded.model.attention._SHORT", 64 * (number // 2 % 2))
    found = compare(family_checkpoint(family, tmp_path / "model"), recompute=number % 2 == 0)
    assert found.score < 2e-5 and found.greedy < 2e-5 and found.gradient < 1e-3 and found.export, found


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "phi3"])
def test_the_self_check_lets_it_pass(family, tmp_path):
    self_check(
        load_model(family_checkpoint(family, tmp_path / family), dtype="bfloat16" if "moe" in family else "auto")
    )


def test_the_page_lists_them_and_what_the_plan_refuses():
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    table, refused = page.split("## Refused")
    assert re.findall(r"^\| ([\w, ]+) \| [\d.]+e", table, re.MULTILINE) == list(FAMILIES)
    for why, types in REFUSED.items():
        assert why in refused and all(f"`{name}`" in refused for name in types)


@pytest.mark.parametrize(
    ("kind", "layers", "words"),
    [
        ("qwen3_next", None, "cannot run a model of type qwen3_next"),
        ("gpt2", None, "cannot run a model of type gpt2"),
        ("made_up", ["full_attention", "rwkv"], "cannot run layers of type rwkv"),
        ("qwen3", ["full_attention", "sliding_attention"], ""),
    ],
)
def test_the_plan_says_no_to_what_the_build_would_refuse(kind, layers, words):
    config = {"model_type": kind} | ({"layer_types": layers} if layers else {})
    found = review(Facts(config_facts(config)), config).problems
    assert [p.headline.removeprefix("embedded ") for p in found] == [words] * bool(words)
    with pytest.raises(PlanError, match="use another engine and trainer"):
        plan(facts=["model.type=qwen3_next"])
