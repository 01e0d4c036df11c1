"""The manifest of a number format, made from what is its own."""

import pytest

from miles_core.plugin.manifest import Pair, Plugin, Rule, Set
from miles_formats.manifest import format_plugin


def made(**more):
    return format_plugin("six_bits", "Six bits", version="1", core="~=0.1", format="six:Six", **more)


def test_the_least_manifest_is_a_format_for_both_sides_or_the_engine_alone():
    assert made() == Plugin(
        name="six_bits",
        summary="Six bits",
        version="1",
        core="~=0.1",
        formats={"six_bits": "six:Six"},
        claims={"precision": "a run has one low-precision format"},
        pairs=(Pair("six_bits", "bf16"), Pair("six_bits", "six_bits")),
        aliases={
            "--rollout-six-bits": {"rollout.precision": "six_bits"},
            "--train-six-bits": {"train.precision": "six_bits"},
        },
    )


def test_hardware_holds_in_every_pair_and_can_be_waived():
    advice = (Rule("plugin.x", "it helps"),)
    plugin = made(hardware=Rule("gpu.sm >= 90", "its cores"), rollout_alone_recommends=advice, experimental=True)
    cores = (Rule("gpu.sm >= 90", "its cores", hardware=True),)
    assert plugin.pairs == (
        Pair("six_bits", "bf16", rules=cores, recommends=advice),
        Pair("six_bits", "six_bits", rules=cores, experimental=True),
    )
    assert made(rollout_alone=False).pairs == (Pair("six_bits", "six_bits"),)


def test_a_condition_can_select_it_for_both_sides():
    both = Set("six_bits", when="six_bits.recipe", because="it says both")
    plugin = made(both_when="six_bits.recipe", both_because="it says both", sets={"train.lr": 1})
    assert plugin.sets == {"rollout.precision": both, "train.precision": both, "train.lr": 1}


def test_further_entries_are_added_and_unknown_ones_refused():
    plugin = made(
        pairs=(Pair("six_bits", "fp9"),), claims={"slot": "one"}, aliases={"--six": {"train.lr": 1}}, demo=True
    )
    assert plugin.pairs[-1] == Pair("six_bits", "fp9") and set(plugin.claims) == {"precision", "slot"}
    assert "--six" in plugin.aliases and "--train-six-bits" in plugin.aliases and plugin.demo
    with pytest.raises(TypeError, match="requirements"):
        made(requirements=())
