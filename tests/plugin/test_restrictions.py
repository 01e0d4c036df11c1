"""The restrictions of the precision table and of the flags, as data, each refused with its reason."""

import pytest
from published_manifests import ALL, INSTALLED, chosen, defaults, facts

from miles_core.errors import PlanError
from miles_core.plugin.facts import Fact
from miles_core.plugin.manifest import Plugin, Rule
from miles_core.plugin.resolve import resolve

ALLOWED = {
    ("bf16", "bf16"),
    ("fp8", "bf16"),
    ("fp8", "fp8"),
    ("mxfp8", "bf16"),
    ("mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("int4", "bf16"),
    ("int4", "int4"),
}
FORMATS = ("bf16", "fp8", "mxfp8", "nvfp4", "int4")


def refusal(requested, given, installed=ALL):
    with pytest.raises(PlanError) as refused:
        resolve(requested, installed, given)
    return refused.value


@pytest.mark.parametrize("rollout", FORMATS)
@pytest.mark.parametrize("train", FORMATS)
def test_every_cell_of_the_precision_table(rollout, train):
    """On a Blackwell GPU each of the 25 cells is accepted or refused as unsupported."""
    given = facts(rollout=rollout, train=train)
    if (rollout, train) in ALLOWED:
        plan = resolve([], ALL, given)
        assert set(plan.order) == {rollout, train} - {"bf16"}
    else:
        error = refusal([], given)
        assert f"{rollout} rollout x {train} train is supported by no active plugin" in str(error)


@pytest.mark.parametrize(
    ("cell", "sm", "reason"),
    [
        (("fp8", "bf16"), 80, "FP8 rollout needs FP8 tensor cores"),
        (("fp8", "fp8"), 80, "FP8 training needs FP8 tensor cores"),
        (("mxfp8", "mxfp8"), 90, "1x32 UE8M0 block scales are a Blackwell tensor-core format"),
        (("mxfp8", "bf16"), 90, "1x32 UE8M0 block scales are a Blackwell tensor-core format"),
        (("nvfp4", "nvfp4"), 90, "E2M1 products exist from Blackwell on"),
    ],
)
def test_absent_tensor_cores_are_refused_with_the_hint_to_emulate(cell, sm, reason):
    given = facts(sm=sm, rollout=cell[0], train=cell[1])
    error = refusal([], given)
    (problem,) = error.problems
    assert problem.because == reason
    assert ("gpu.sm", str(sm), "detected: NVIDIA H200") in problem.values
    assert "    --emulate-precision" in str(error)


@pytest.mark.parametrize("cell", sorted(ALLOWED))
def test_emulation_makes_every_supported_cell_runnable_without_a_gpu(cell):
    none = [Fact(name, 0, "detected: no NVIDIA driver") for name in ("gpu.sm", "gpu.count")]
    given = facts(chosen("precision.emulated", True, "--emulate-precision"), *none, rollout=cell[0], train=cell[1])
    plan = resolve([], ALL, given)
    assert all("gpu.sm = 0 (detected: no NVIDIA driver)" in line for line in plan.waived)
    assert bool(plan.waived) == (set(cell) & {"fp8", "mxfp8", "nvfp4"} != set())


def test_emulation_does_not_make_an_unsupported_cell_runnable():
    given = facts(chosen("precision.emulated", True), rollout="bf16", train="fp8")
    assert "is supported by no active plugin" in str(refusal([], given))


def test_fp8_and_mxfp8_rollout_exclude_each_other():
    error = refusal(["fp8", "mxfp8"], facts(rollout="fp8", train="fp8"))
    (problem,) = error.problems
    assert problem.headline == "fp8 and mxfp8 both claim 'precision'"
    assert problem.because == "a run has one low-precision format"
    assert "    drop mxfp8 from --plugins" in str(error)


def test_mxfp8_training_requires_mxfp8_rollout():
    error = refusal(["mxfp8"], facts(rollout="bf16", train="mxfp8"))
    assert error.problems[0].headline == "mxfp8 needs rollout.precision == mxfp8"
    assert error.problems[0].because == "MXFP8 training is only exact against MXFP8 rollout"
    assert "--rollout-precision mxfp8 --train-precision mxfp8" in str(error)


def deepep(**precision):
    choices = ("none", "deepep")
    flag = "--sglang-moe-a2a-backend"
    backend = Fact("sglang.moe_a2a_backend", "deepep", f"{flag} deepep", flag=flag, choices=choices, chosen=True)
    return facts(chosen("engine", "sglang"), backend, **precision)


def test_mxfp8_on_sglang_excludes_the_deepep_backend():
    error = refusal(["mxfp8"], deepep(rollout="mxfp8", train="mxfp8"))
    (problem,) = error.problems
    assert problem.because == "SGLang has no MXFP8 DeepEP kernel yet"
    assert "    --sglang-moe-a2a-backend none" in str(error)


def test_deepep_is_fine_with_other_formats():
    assert resolve([], ALL, deepep(rollout="fp8", train="fp8")).order == ("fp8", "sglang")


def test_the_refusal_reads_as_designed():
    error = refusal(["mxfp8"], deepep(sm=90, rollout="mxfp8", train="mxfp8"))
    expected = """\
this run cannot start (2 problems)

  x mxfp8 needs sglang.moe_a2a_backend != deepep
    | sglang.moe_a2a_backend = deepep   --sglang-moe-a2a-backend deepep
    | engine = sglang                   --engine sglang
    | because SGLang has no MXFP8 DeepEP kernel yet

  x mxfp8 rollout x mxfp8 train needs gpu.sm >= 100
    | gpu.sm = 90   detected: NVIDIA H200
    | because 1x32 UE8M0 block scales are a Blackwell tensor-core format

  any one of these would do:
    --sglang-moe-a2a-backend none --emulate-precision
    --plugins fp8 --rollout-precision fp8 --train-precision bf16
    --plugins fp8 --rollout-precision fp8 --train-precision fp8
    --plugins int4 --rollout-precision int4 --train-precision bf16
    --plugins int4 --rollout-precision int4 --train-precision int4
    --rollout-precision bf16 --train-precision bf16"""
    assert str(error) == expected


def test_r3_is_refused_for_a_dense_model():
    error = refusal(["r3"], facts(moe=False))
    (problem,) = error.problems
    assert problem.headline == "r3 needs model.moe"
    assert problem.because == "there is no router to replay in a dense model"


def test_r3_is_refused_on_an_engine_that_returns_no_routing():
    error = refusal(["r3"], facts(*defaults(*INSTALLED.values()), chosen("engine", "plain")), INSTALLED)
    (problem,) = error.problems
    assert problem.headline == "r3 needs the engine capability routed_experts"
    assert problem.because == "R3 replays the routing the engine reports"
    assert "    --engine embedded" in str(error)


def test_low_precision_rollout_with_bf16_training_recommends_r3_and_tis_on_a_moe_model():
    advice = resolve([], ALL, facts(rollout="fp8")).advice
    assert [line.partition(":")[0] for line in advice] == [
        "fp8 rollout x bf16 train recommends --plugins r3",
        "fp8 rollout x bf16 train recommends --plugins tis",
    ]
    assert [line for line in resolve([], ALL, facts(rollout="fp8", moe=False)).advice if "--plugins r3" in line] == []
    assert resolve(["r3", "tis"], ALL, facts(rollout="fp8")).advice == ()
    assert resolve([], ALL, facts(rollout="fp8", train="fp8")).advice == ()


def test_nvfp4_says_that_it_is_experimental():
    advice = resolve([], ALL, facts(rollout="nvfp4", train="nvfp4")).advice
    assert advice == ("nvfp4 rollout x nvfp4 train is experimental (nvfp4)",)


def test_an_active_format_that_neither_side_uses_gets_a_note():
    (line,) = resolve(["int4"], ALL, facts()).advice
    assert line.startswith("int4 is active, but neither side uses its format") and "--rollout-precision int4" in line


def test_an_option_of_a_plugin_that_is_not_active_is_refused_with_the_command():
    error = refusal([], facts(chosen("tis.threshold", 3.0, "--tis-threshold")))
    assert error.problems[0].headline == "--tis-threshold 3.0 needs plugin.tis"
    assert "    add tis to --plugins" in str(error)


def test_a_switch_turned_off_needs_no_plugin():
    assert resolve([], ALL, facts(chosen("sglang.enable_return_routed_experts", False))).order == ()


def test_a_flag_with_several_owners_belongs_to_the_active_one():
    recipe = {"flag": "--fp8-recipe", "chosen": True}
    shared = [Fact(f"{owner}.recipe", "mxfp8", "--fp8-recipe mxfp8", **recipe) for owner in ("fp8", "mxfp8")]
    assert resolve(["mxfp8"], ALL, facts(*shared, rollout="mxfp8", train="mxfp8")).order == ("mxfp8",)


def test_a_precision_and_an_option_that_must_change_together_are_offered():
    rule = Rule("small.batches", "larger ones do not fit")
    parts = {"provides": {"engine": {"big": "big:make"}}, "capabilities": {"engine": ("format:*",)}}
    backend = Plugin("backend", "an engine that needs much memory", "1", "~=0.1", requires=(rule,), **parts)
    batches = Fact("small.batches", False, "default", flag="--small-batches", choices=(False, True))
    given = facts(chosen("engine", "big"), batches, rollout="nvfp4")
    error = refusal([], given, {**ALL, "backend": backend})
    assert [p.headline for p in error.problems] == [
        "backend needs small.batches",
        "nvfp4 rollout x bf16 train is supported by no active plugin",
    ]
    assert "    --plugins fp8 --rollout-precision fp8 --train-precision bf16 --small-batches" in str(error)


def test_all_violations_come_at_once():
    given = facts(
        chosen("engine", "plain"), chosen("tis.threshold", 3.0), sm=80, moe=False, rollout="mxfp8", train="fp8"
    )
    error = refusal(["r3", "nvfp4"], given)
    assert str(error).endswith("no small change would do: each of these has to be resolved")
    headlines = {p.headline for p in error.problems}
    assert headlines == {
        "r3 needs model.moe",
        "r3 needs the engine capability routed_experts",
        "--tis-threshold 3.0 needs plugin.tis",
        "mxfp8 rollout x fp8 train is supported by no active plugin",
        "nvfp4 and mxfp8 both claim 'precision'",
        "nvfp4 and fp8 both claim 'precision'",
        "mxfp8 and fp8 both claim 'precision'",
    }
