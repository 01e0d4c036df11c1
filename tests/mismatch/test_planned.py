"""The lines of a plan about the check of the first step."""

import pytest

from miles_core.config.load import load
from miles_core.mismatch.tolerance import Side, first_step_bound
from miles_core.plugin.discovery import discover
from miles_core.plugin.load import import_target
from miles_core.plugin.rule import Truth, evaluate
from miles_testing import plan

H200 = ["hardware=H200"]


def lines(*args, **options):
    reviews = plan(*args, **{"self_check": True, **options}).reviews
    return [line for block in reviews for line in block.splitlines() if line.startswith("first step")]


@pytest.mark.parametrize(
    ("given", "sides", "bound"),
    [
        ({}, "engine (float32) and trainer (float32)", 0.0016),
        ({"dtype": "float16"}, "engine (float16) and trainer (float16)", 0.015),
        ({"facts": H200}, "engine (bfloat16) and trainer (bfloat16)", 0.11),
        ({"facts": H200, "rollout_fp8": True, "train_fp8": True}, "engine (bfloat16, fp8) and trainer (bfloat16, fp8)", 0.25),
        ({"facts": H200, "rollout_fp8": True}, "engine (bfloat16, fp8) and trainer (bfloat16)", 0.46),
        ({"facts": H200, "kv_cache_dtype": "float8_e4m3fn"}, "engine (bfloat16, float8_e4m3fn cache) and trainer (bfloat16)", 0.34),
    ],
)  # fmt: skip
def test_a_plan_says_how_far_engine_and_trainer_may_differ(given, sides, bound):
    (line,) = lines(**given)
    assert f"if {sides} differ by more than {bound} nats per token on average, the run stops" in line


def test_a_warm_up_has_the_bounds_of_both_phases():
    first, then = lines(rollout_int4=True, train_int4=True, warmup_steps=4, allow_mismatch=True)
    assert "engine (float32) and trainer" in first and "engine (float32, int4) and trainer" in then
    assert first.endswith("that is a warning")


def test_without_the_check_there_is_no_line():
    assert lines(self_check=False) == []


def test_manifests_declare_what_their_formats_round():
    installed = discover()
    config = load([], manifests=installed)
    facts = plan(["int4"], rollout_int4=True)._facts
    found = {}
    for plugin in installed.values():
        for name, target in plugin.formats.items():
            format = import_target(plugin.name, target).from_config(config)
            (error, *_) = [e for when, e in plugin.format_error.items() if evaluate(when, facts.lookup) is Truth.TRUE]
            assert (error, plugin.rounds_inputs) == (format.error, format.quantizes_activations), name
            found[name] = error
    assert {"fp8", "mxfp8", "nvfp4", "int4"} <= found.keys()


def test_a_format_that_declares_no_error(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from miles_formats import format_plugin\n"
        "plugin = format_plugin('mine', 'Mine', version='1', core='~=0.1', format='miles_int4.format:Int4')\n"
    )
    (line,) = lines([str(tmp_path / "mine.py")], rollout_precision="mine")
    assert "the manifest of mine declares no error" in line


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0.0017), ("bfloat16", 0.11)])
def test_the_bounds_of_the_documentation(dtype, bound):
    assert first_step_bound(Side(dtype), Side(dtype)) == pytest.approx(bound, rel=0.05)
