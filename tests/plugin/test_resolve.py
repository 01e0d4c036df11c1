import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_manifests import ALL, INSTALLED, chosen, defaults, facts

from miles_core.data.field import Field
from miles_core.errors import PlanError
from miles_core.plugin.check import check
from miles_core.plugin.facts import Fact, Facts, State
from miles_core.plugin.fixes import find_fixes
from miles_core.plugin.manifest import Capability, Pair, Plugin, Rule, Set
from miles_core.plugin.options import option
from miles_core.plugin.resolve import resolve

NAMES = ("a", "b", "c", "d")
FLAGS = ("x", "y", "z")


def plugin(name, **parts):
    return Plugin(name, f"plugin {name}", "1.0", "~=0.1", **parts)


def headlines(requested, manifests, given=None):
    return [p.headline for p in check(requested, manifests, given or Facts()).problems]


@st.composite
def plugins(draw):
    """A few plugins with random rules over three switches, claims and order."""
    found = {}
    for name in NAMES:
        others = [n for n in NAMES if n != name]
        needs = draw(st.lists(st.sampled_from(FLAGS), max_size=2, unique=True))
        required = draw(st.lists(st.sampled_from(others), max_size=1))
        found[name] = plugin(
            name,
            requires=tuple(Rule(f"switch.{n}", f"{name} wants {n}") for n in needs)
            + tuple(Rule(f"plugin.{n}", f"{name} wants {n}") for n in required),
            claims={"slot": "one only"} if draw(st.booleans()) else {},
            before=tuple(draw(st.lists(st.sampled_from(others), max_size=1))),
        )
    return found


def switches(values):
    return Facts(
        Fact(f"switch.{n}", v, "test", flag=f"--{n}", choices=(False, True), chosen=True)
        for n, v in zip(FLAGS, values, strict=True)
    )


REQUESTS = st.lists(st.sampled_from(NAMES), max_size=3, unique=True)
VALUES = st.tuples(*[st.booleans()] * 3)


@given(plugins(), REQUESTS, VALUES)
@settings(max_examples=80)
def test_a_plan_is_a_function_of_its_inputs(manifests, requested, values):
    first, second = (check(requested, manifests, switches(values)) for _ in range(2))
    assert first.problems == second.problems
    if not first.problems:
        assert first.plan() == second.plan()
        shuffled = {name: manifests[name] for name in reversed(manifests)}
        assert check(requested, shuffled, switches(values)).plan().digest == first.plan().digest


@given(plugins(), REQUESTS, VALUES)
@settings(max_examples=80)
def test_every_violation_is_reported_and_nothing_else(manifests, requested, values):
    """Against a direct reading: closure of requirements, each broken switch, each pair of claimants."""
    active, waiting = set(), list(requested)
    while waiting:
        name = waiting.pop()
        if name not in active:
            active.add(name)
            waiting += [r.needs[7:] for r in manifests[name].requires if r.needs.startswith("plugin.")]
    state = dict(zip((f"switch.{n}" for n in FLAGS), values, strict=True))
    expected = {f"{n} needs {r.needs}" for n in active for r in manifests[n].requires if not state.get(r.needs, True)}
    claimants = sorted(n for n in active if manifests[n].claims)
    found = headlines(requested, manifests, switches(values))
    assert {h for h in found if " needs " in h} == expected
    assert sum("both claim" in h for h in found) == len(claimants) * (len(claimants) - 1) // 2


@given(plugins(), REQUESTS, VALUES)
@settings(max_examples=80)
def test_order_respects_before_and_breaks_ties_by_request(manifests, requested, values):
    checked = check(requested, manifests, switches(values))
    order = checked.order
    if any("form a cycle" in p.verb for p in checked.problems):
        return
    for name in order:
        for other in manifests[name].before:
            assert other not in order or order.index(name) < order.index(other)
    free = [n for n in order if not any(n in (m, *manifests[m].before) and manifests[m].before for m in order)]
    assert free == sorted(free, key=list(checked.activation.active).index)


@given(plugins(), REQUESTS, VALUES)
@settings(max_examples=60)
def test_every_suggested_fix_is_accepted(manifests, requested, values):
    given_facts = switches(values)
    refused = check(requested, manifests, given_facts)
    if refused.problems:
        for fix in find_fixes(requested, manifests, given_facts, refused):
            assert check(fix.requested, manifests, fix.facts).problems == []


@given(st.sets(st.sampled_from(sorted(ALL)), max_size=3), st.sampled_from((0, 80, 90, 100)), st.booleans(), st.data())
@settings(max_examples=60)
def test_every_fix_for_the_published_plugins_is_accepted(requested, sm, moe, data):
    formats = st.sampled_from(("bf16", "fp8", "mxfp8", "nvfp4", "int4"))
    given_facts = facts(sm=sm, moe=moe, rollout=data.draw(formats), train=data.draw(formats))
    refused = check(sorted(requested), ALL, given_facts)
    if refused.problems:
        found = find_fixes(sorted(requested), ALL, given_facts, refused)
        assert found, "going back to bf16 or dropping a plugin always helps here"
        for fix in found:
            assert check(fix.requested, ALL, fix.facts).problems == []


def test_a_cycle_is_told_with_its_path():
    manifests = {"a": plugin("a", before=("b",)), "b": plugin("b", before=("a",))}
    (headline,) = headlines(["a", "b"], manifests)
    assert headline in (
        "these plugins form a cycle: a -> b -> a",
        "these plugins form a cycle: b -> a -> b",
    )


def test_required_plugins_are_activated_and_say_why():
    manifests = {"a": plugin("a", requires=(Rule("plugin.b", "a counts what b writes"),)), "b": plugin("b")}
    plan = resolve(["a"], manifests, Facts())
    assert [(p.name, p.because) for p in plan.plugins] == [
        ("a", "--plugins"),
        ("b", "required by a: a counts what b writes"),
    ]


def test_a_required_plugin_that_is_not_installed_is_told():
    with pytest.raises(PlanError, match=r"a needs plugin\.b") as refused:
        resolve(["a"], {"a": plugin("a", requires=(Rule("plugin.b", "why"),))}, Facts())
    assert "no plugin b is installed" in str(refused.value) and "pip" not in str(refused.value)


def test_naming_a_plugin_that_is_not_there_suggests_the_nearest():
    with pytest.raises(PlanError) as refused:
        resolve(["tsi"], ALL, Facts())
    assert "did you mean tis?" in str(refused.value)
    assert "    tis instead of tsi in --plugins" in str(refused.value)


def test_core_cannot_be_named():
    assert headlines(["core"], {}) == ["--plugins must not name 'core'"]


def test_a_selected_engine_activates_its_plugin():
    plan = resolve([], ALL, Facts([chosen("engine", "sglang")]))
    assert [(p.name, p.because) for p in plan.plugins] == [("sglang", "engine = sglang (--engine sglang)")]


def test_an_engine_nobody_provides_names_those_there_are():
    with pytest.raises(PlanError) as refused:
        resolve([], INSTALLED, facts(chosen("engine", "sglnag")))
    assert "installed plugins provide embedded, plain, sglang; did you mean sglang?" in str(refused.value)
    assert "    --engine sglang" in str(refused.value)


def test_an_unknown_format_names_those_there_are():
    with pytest.raises(PlanError, match="this run needs a number format 'fp9'") as refused:
        resolve([], ALL, facts(rollout="fp9"))
    assert "installed formats are bf16, fp8, int4, mxfp8, nvfp4; did you mean fp8?" in str(refused.value)


def test_plugins_made_for_another_core_are_refused():
    old = dataclasses.replace(plugin("a"), core="~=9.0")
    assert headlines(["a"], {"a": old}) == ["a needs miles-core ~=9.0"]


def test_an_unknown_fact_in_a_rule_is_an_error_with_the_nearest_name():
    broken = plugin("a", requires=(Rule("gpu.smm >= 90", "tensor cores"),))
    (problem,) = check(["a"], {"a": broken}, facts()).problems
    assert problem.headline == "a has a broken rule: 'gpu.smm >= 90' names gpu.smm"
    assert problem.because == "no part of this run defines it; did you mean gpu.sm?"


def test_a_rule_whose_when_does_not_hold_may_name_what_is_not_installed():
    rule = Rule("other.option == 1", "because", when="engine == other")
    assert headlines(["a"], {"a": plugin("a", requires=(rule,))}, facts()) == []


def test_a_rule_on_the_gpu_is_left_to_the_workers_where_the_host_does_not_know():
    unknown = Fact("gpu.sm", None, "declared", State.UNKNOWN)
    plan = resolve([], ALL, facts(rollout="mxfp8", train="mxfp8").with_facts([unknown]))
    (rule,) = plan.deferred
    assert (rule.needs, rule.holds_here) == ("gpu.sm >= 100", False)
    with pytest.raises(PlanError, match="this worker cannot start") as refused:
        plan.check_deferred([Fact("gpu.sm", 90, "detected: NVIDIA H200")])
    assert "gpu.sm = 90   detected: NVIDIA H200" in str(refused.value)
    plan.check_deferred([Fact("gpu.sm", 100, "detected: NVIDIA B200")])
    with pytest.raises(PlanError):
        plan.check_deferred([])


def test_a_rule_on_the_gpu_that_holds_here_is_checked_again_on_the_workers():
    plan = resolve([], ALL, facts(rollout="mxfp8", train="mxfp8"))
    assert [rule.holds_here for rule in plan.deferred] == [True]
    with pytest.raises(PlanError):
        plan.check_deferred([Fact("gpu.sm", 90, "detected: NVIDIA H200")])


def test_a_driver_without_a_gpu_says_nothing_about_a_remote_runtime():
    none = [Fact("gpu", "none", "detected: no NVIDIA driver"), Fact("gpu.sm", 0, "detected: no NVIDIA driver")]
    given_facts = facts(chosen("runtime", "ray"), *none, rollout="mxfp8", train="mxfp8")
    assert [rule.holds_here for rule in resolve([], ALL, given_facts).deferred] == [False]
    inline = facts(*none, rollout="mxfp8", train="mxfp8")
    assert headlines([], ALL, inline) == ["mxfp8 rollout x mxfp8 train needs gpu.sm >= 100"]


@dataclasses.dataclass
class Options:
    level: int = option(1, help="a level", flag="--level", choices=(1, 2, 3))
    on: bool = option(False, help="a switch", flag="--on")


OPTIONS = Facts(defaults(plugin("part", config=Options)))


def test_sets_become_facts_with_the_plugin_as_origin():
    manifests = {"part": plugin("part", config=Options), "a": plugin("a", sets={"part.level": 2})}
    plan = resolve(["part", "a"], manifests, OPTIONS)
    assert [(s.path, s.value, s.plugin) for s in plan.sets] == [("part.level", 2, "a")]
    assert next(str(f) for f in plan.facts if f.name == "part.level") == "part.level = 2 (set by a)"


def test_sets_of_parts_that_take_no_part_are_left_out():
    manifests = {"part": plugin("part", config=Options), "a": plugin("a", sets={"part.level": 2, "gone.x": 1})}
    assert resolve(["a"], manifests, OPTIONS).sets == ()


def test_sets_of_an_option_that_does_not_exist_are_refused():
    manifests = {"part": plugin("part", config=Options), "a": plugin("a", sets={"part.levle": 2})}
    (problem,) = check(["part", "a"], manifests, OPTIONS).problems
    assert problem.headline == "a sets part.levle, which no part defines"
    assert problem.because == "did you mean part.level?"


def test_one_of_several_values_is_set_by_its_condition():
    values = (Set(2, "part.on"), Set(5, "not part.on"))
    manifests = {"part": plugin("part", config=Options, sets={"part.level": values})}
    assert [s.value for s in resolve(["part"], manifests, OPTIONS).sets] == [5]
    on = OPTIONS.with_facts([Fact("part.on", True, "--on", chosen=True)])
    assert [s.value for s in resolve(["part"], manifests, on).sets] == [2]


def test_two_plugins_that_set_different_values_conflict():
    manifests = {
        "part": plugin("part", config=Options),
        "a": plugin("a", sets={"part.level": 2}),
        "b": plugin("b", sets={"part.level": Set(3, because="b counts in threes")}),
    }
    (problem,) = check(["part", "a", "b"], manifests, OPTIONS).problems
    assert problem.headline == "b needs part.level == 3"
    assert problem.values == (("part.level", "2", "set by a"), ("part.level", "3", "set by b"))
    assert problem.because == "b counts in threes"


def test_a_set_value_against_the_users_is_a_conflict_with_a_fix():
    manifests = {"part": plugin("part", config=Options), "a": plugin("a", sets={"part.level": 2})}
    user = Facts([Fact("part.level", 3, "--level 3", flag="--level", choices=(1, 2, 3), chosen=True)])
    with pytest.raises(PlanError, match=r"a needs part\.level == 2") as refused:
        resolve(["part", "a"], manifests, user)
    assert "    --level 2" in str(refused.value)
    agreeing = Facts([Fact("part.level", 2, "--level 2", flag="--level", chosen=True)])
    assert resolve(["part", "a"], manifests, agreeing).sets[0].value == 2


def test_conditions_of_sets_see_what_others_set():
    manifests = {
        "part": plugin("part", config=Options),
        "a": plugin("a", sets={"part.on": True}),
        "b": plugin("b", sets={"part.level": Set(3, when="part.on")}),
    }
    assert [s.path for s in resolve(["part", "b", "a"], manifests, OPTIONS).sets] == ["part.level", "part.on"]
    assert resolve(["part", "b"], manifests, OPTIONS).sets == ()


def test_sets_that_chase_each_other_are_refused():
    manifests = {
        "part": plugin("part", config=Options),
        "a": plugin("a", sets={"part.on": Set(True, when="part.level == 1"), "part.level": Set(2, when="part.on")}),
    }
    assert headlines(["part", "a"], manifests, OPTIONS) == ["what plugins set never settles"]


def test_a_set_whose_condition_is_unknown_here_is_refused():
    manifests = {
        "part": plugin("part", config=Options),
        "a": plugin("a", sets={"part.on": Set(True, when="gpu.sm >= 90")}),
    }
    unknown = OPTIONS.with_facts([Fact("gpu.sm", None, "declared", State.UNKNOWN)])
    (problem,) = check(["part", "a"], manifests, unknown).problems
    assert "give it with --fact" in problem.because


def test_hooks_are_chosen_by_their_condition():
    hooks = {"": "m:Always", "engine == sglang": ("m:One", "m:Two"), "gpu.sm >= 90": "m:Fast"}
    manifests = {**ALL, "a": plugin("a", hooks=hooks)}
    given_facts = facts(Fact("gpu.sm", None, "declared", State.UNKNOWN))
    found = resolve(["a"], manifests, given_facts).hooks
    assert [(h.target, h.deferred) for h in found] == [("m:Always", False), ("m:Fast", True)]
    found = resolve(["a"], manifests, given_facts.with_facts([chosen("engine", "sglang")])).hooks
    assert [h.target for h in found] == ["m:Always", "m:One", "m:Two", "m:Fast"]


def test_facts_say_which_capabilities_are_used():
    manifests = {**ALL, "a": plugin("a", hooks={"engine.uses.routed_experts": "m:Taps"})}
    assert resolve(["a"], manifests, facts()).hooks == ()
    assert [h.target for h in resolve(["a", "r3"], manifests, facts()).hooks if h.plugin == "a"] == ["m:Taps"]


def test_a_capability_no_backend_has_is_refused():
    (headline,) = headlines(["a"], {"a": plugin("a", uses={"routed_expert": "why"})}, facts())
    assert headline == "a needs capability routed_expert, which no backend has"


def test_one_field_declared_twice_must_be_the_same():
    one, other = Field("score", "float32", "response"), Field("score", "int8", "response")
    manifests = {"a": plugin("a", fields=(one,)), "b": plugin("b", fields=(other,)), "c": plugin("c", fields=(one,))}
    assert headlines(["a", "b"], manifests) == ["a and b declare field 'score' differently"]
    assert headlines(["a", "c"], manifests) == []


def test_a_field_of_core_cannot_be_redeclared():
    clash = plugin("a", fields=(Field("loss_mask", "int8", "response"),))
    assert headlines(["a"], {"a": clash}) == ["a and core declare field 'loss_mask' differently"]


def test_two_providers_of_one_name_are_refused():
    manifests = {n: plugin(n, provides={"decoder": {"tree": f"{n}:make"}}, formats={"f": "m:F"}) for n in "ab"}
    assert headlines(["a", "b"], manifests) == [
        "a and b both provide the decoder 'tree'",
        "a and b both provide the format 'f'",
    ]


def test_claims_and_cells_are_per_policy():
    base = facts().values()
    two = [
        *(Fact(f"policies.red.{s}.precision", "fp8", "yaml", chosen=True) for s in ("rollout", "train")),
        *(Fact(f"policies.blue.{s}.precision", "mxfp8", "yaml", chosen=True) for s in ("rollout", "train")),
    ]
    assert set(resolve([], ALL, Facts([*base, *two])).order) == {"fp8", "mxfp8"}
    mixed = [*two[:3], Fact("policies.blue.train.precision", "fp8", "yaml", chosen=True)]
    found = headlines([], ALL, Facts([*base, *mixed]))
    assert "mxfp8 rollout x fp8 train of blue is supported by no active plugin" in found
    assert "fp8 and mxfp8 both claim 'precision' of blue" in found


def test_a_third_partys_cell_needs_no_edit_anywhere():
    manifests = {**ALL, "mxfp6": plugin("mxfp6", formats={"mxfp6": "m:F"}, pairs=(Pair("mxfp6", "bf16"),))}
    assert resolve([], manifests, facts(rollout="mxfp6")).order == ("mxfp6",)


def server(**parts):
    return plugin("server", provides={"engine": {"server": "m:f"}}, **parts)


def test_a_capability_with_a_condition_holds_where_the_condition_does():
    manifests = {
        "server": server(capabilities={"engine": (Capability("exact", when="switch.x"),)}),
        "user": plugin("user", uses={"exact": "it compares tokens"}),
    }
    facts = [chosen("engine", "server"), Fact("switch.x", False, "default", flag="--x", choices=(False, True))]
    with pytest.raises(PlanError) as refused:
        resolve(["user"], manifests, Facts(facts))
    text = str(refused.value)
    assert "user needs switch.x" in text and "server has exact only when switch.x; it compares tokens" in text
    assert "    --x" in text
    assert resolve(["user"], manifests, Facts([facts[0], chosen("switch.x", True)]))


def test_an_environment_variable_is_set_by_one_plugin_and_not_against_the_user():
    manifests = {n: plugin(n, sets={"env.DEVICE_ORDER": v}) for n, v in (("a", "1"), ("b", "2"))}
    (setting,) = resolve(["a"], manifests, Facts()).sets
    assert (setting.path, setting.value, setting.plugin) == ("env.DEVICE_ORDER", "1", "a")
    with pytest.raises(PlanError, match=r"env\.DEVICE_ORDER = 1\s+set by a"):
        resolve(["a", "b"], manifests, Facts())
    user = Fact("env.DEVICE_ORDER", "0", "environment variable DEVICE_ORDER", chosen=True)
    with pytest.raises(PlanError, match="environment variable DEVICE_ORDER"):
        resolve(["a"], manifests, Facts([user]))


def test_a_transport_that_the_engine_does_not_take_is_refused():
    facts = Facts([chosen("engine", "server"), chosen("transport", "pigeon")])
    pigeon = plugin("pigeon", provides={"transport": {"pigeon": "m:f"}}, capabilities={"transport": ("pigeon",)})
    with pytest.raises(PlanError, match="the transport pigeon needs the engine capability transport:pigeon"):
        resolve(["pigeon"], {"server": server(), "pigeon": pigeon}, facts)
    knows = server(capabilities={"engine": ("transport:pigeon",)})
    assert resolve(["pigeon"], {"server": knows, "pigeon": pigeon}, facts).order == ("pigeon", "server")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_response_that_goes_on_in_the_engine_needs_versions_of_its_tokens(mode):
    facts = Facts([chosen("engine", "server"), chosen("rollout.pause_generation_mode", mode)])
    with pytest.raises(PlanError) as refused:
        resolve(["server"], {"server": server()}, facts)
    text = str(refused.value)
    assert "--pause-generation-mode needs the engine capability token_versions" in text
    assert "--pause-generation-mode abort works with any engine" in text
    assert resolve(["server"], {"server": server(capabilities={"engine": ("token_versions",)})}, facts)


def test_an_environment_variable_for_gpus_of_other_machines_is_set():
    manifests = {"a": plugin("a", sets={"env.QUEUES": Set("1", when="gpu.sm >= 90")})}
    (setting,) = check(["a"], manifests, Facts([Fact("gpu.sm", None, "declared", State.UNKNOWN)])).sets
    assert (setting.path, setting.value) == ("env.QUEUES", "1")
    assert not check(["a"], manifests, Facts([Fact("gpu.sm", 80, "detected")])).sets
    manifests = {"a": plugin("a", sets={"env.QUEUES": Set("1", when="gpu.sm >= 90 and model.moe")})}
    unknown = Facts([Fact(name, None, "declared", State.UNKNOWN) for name in ("gpu.sm", "model.moe")])
    (problem,) = check(["a"], manifests, unknown).problems
    assert "give it with --fact" in problem.because
