from published_manifests import ALL, chosen, facts

from miles_core.plugin.check import check
from miles_core.plugin.manifest import Plugin, Rule, Set
from miles_tools.authoring.explain import explain, lint


def told(name, *more, **given):
    return explain(ALL[name], check([name], ALL, facts(*more, **given)), "miles-plugin-x 0.1.0")


def test_each_constraint_is_told_with_its_reason_and_outcome():
    text = told("mxfp8", sm=90, rollout="mxfp8", train="mxfp8")
    for line in (
        "mxfp8 0.1.0 (miles-plugin-x 0.1.0): MXFP8",
        "    because MXFP8 training is only exact against MXFP8 rollout",
        "    here it holds: rollout.precision = mxfp8 (--rollout-precision mxfp8), "
        "train.precision = mxfp8 (--train-precision mxfp8)",
        "  supports mxfp8 rollout x mxfp8 train",
        "      because 1x32 UE8M0 block scales are a Blackwell tensor-core format",
        "      here it does not hold; --emulate-precision runs the same numerics without it: "
        "gpu.sm = 90 (detected: NVIDIA H200)",
        "  claims 'precision', as do fp8, nvfp4, int4",
    ):
        assert line in text.splitlines(), (line, text)


def test_capabilities_sets_and_order_are_told():
    text = told("r3", chosen("engine", "plain"))
    for line in (
        "    here engine = plain (--engine plain) lacks it",
        "  sets sglang.enable_return_routed_experts = true (not applied here)",
        "  comes before tis in every chain",
    ):
        assert line in text.splitlines(), (line, text)
    assert "(applied here)" in told("r3", chosen("engine", "sglang"))


def test_mistakes_of_a_manifest_are_found_whatever_the_run():
    wrong = Plugin(
        "wrong",
        "",
        "1",
        "~=0.1",
        hooks={"": "miles_not_there:Hooks"},
        requires=(
            Rule("gpu.smm >= 90", "typo", when="engine == nobody"),
            Rule("gpu.sm >=", "cannot be read"),
            Rule("elsewhere.option == 1", "of a plugin that is not installed: cannot be checked"),
        ),
        sets={"sglang.moe_backend": Set(1, when="trainer == megatron"), "sglang.moe_a2a_backend": "none"},
    )
    found = lint(wrong, {**ALL, "wrong": wrong}, facts())
    assert found == [
        "rule 'gpu.smm >= 90' names gpu.smm, which nothing defines; did you mean gpu.sm?",
        "condition 'gpu.sm >=': expected a value, found the end",
        "it sets sglang.moe_backend, which nothing defines; did you mean sglang.moe_a2a_backend?",
        "plugin wrong: its hooks are in miles_not_there, which cannot be found",
    ]
