"""The contract of a format's plugin notices manifests that do not hold what they say."""

from dataclasses import replace

import pytest

from miles_core.plugin.discovery import discover
from miles_core.plugin.manifest import Pair, Rule
from miles_testing import FormatPluginContract, plan

FP8 = discover()["fp8"]
BROKEN = {
    "test_the_format_is_where_the_manifest_says": replace(FP8, version="0.0.1"),
    "test_hardware_is_checked_and_emulation_waives_it": replace(
        FP8, pairs=(Pair("fp8", "fp8", rules=(Rule("gpu.sm >= 100", "more than it checks", hardware=True),)),)
    ),
    "test_one_side_alone_is_refused_unless_the_manifest_pairs_it": replace(FP8, pairs=()),
    "test_recommendations_are_those_of_the_pair": replace(
        FP8, pairs=(Pair("fp8", "bf16", recommends=(Rule("plugin.r3", "another reason"),)),)
    ),
}


@pytest.mark.parametrize("test", BROKEN)
def test_a_manifest_that_says_something_else_is_noticed(test):
    suite = type("Suite", (FormatPluginContract,), {"plugin": BROKEN[test]})()
    check = getattr(suite, test)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(plan) if "manifest_says" not in test else check()
