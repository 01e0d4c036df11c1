"""What core's own options require of the backends, parts that no option names, and checks of a plan other than rules."""

import pytest
from published_manifests import gpu

from miles_core.config.load import load
from miles_core.errors import ConfigError, PlanError, PluginError
from miles_core.plugin.check import check
from miles_core.plugin.detect import model_facts
from miles_core.plugin.discovery import discover
from miles_core.plugin.facts import Fact, Facts
from miles_core.plugin.load import Hooks
from miles_core.plugin.manifest import Package, Plugin, Rule
from miles_core.run.prepare import prepare
from miles_embedded import plugin as embedded
from miles_tools.authoring.explain import lint
from miles_workers.manifest import plugin as workers

PARTS = {"engine": {"x": "m:e"}, "trainer": {"y": "m:t"}}


def mine(name="mine", **parts):
    return Plugin(name, "", "1", ">=0", **parts)


def problems(flags, **parts):
    """Headlines of a run whose backends are ``mine``'s."""
    config = load(
        ["--engine", "x", "--trainer", "y", *flags], manifests=[embedded, workers, mine(**{"provides": PARTS} | parts)]
    )
    found = check({"mine": "--plugins"}, config.schema.manifests, Facts(config.facts()))
    return [p.headline for p in found.problems], found.advice


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (["--rollout-top-p", "0.8"], ["engine capability sampling_support", "trainer capability sampling_support"]),
        (["--rollout-top-k", "5"], ["engine capability sampling_support", "trainer capability sampling_support"]),
        (["--rollout-top-p", "0.8", "--full-vocab-logprobs"], []),
        (["--entropy-coef", "0.01"], ["trainer capability entropy"]),
        ([], []),
    ],
)
def test_options_of_core_need_what_a_backend_can(flags, needed):
    found, _ = problems(flags)
    assert [h.partition("needs the ")[2] for h in found] == needed
    can = {"engine": ("sampling_support",), "trainer": ("sampling_support", "entropy")}
    assert problems(flags, capabilities=can)[0] == []


@pytest.mark.parametrize("without", ["", "it is slower"])
def test_a_missing_optional_package_is_a_note_and_a_missing_needed_one_a_problem(without):
    package = Package("not-a-package", "~=1.0", install="pip install it", without=without)
    parts = {"mine": mine(packages=(package,))}
    for installed, note in (("none", "mine: without not-a-package ~=1.0 it is slower; pip install it"), ("1.2", "")):
        facts = Facts([*model_facts(None), *gpu("H200", 90), Fact("package.not-a-package", installed, "a test")])
        found = check({"mine": "--plugins"}, parts, facts)
        assert (note in found.advice) == bool(note and without)
        assert ["mine needs not-a-package ~=1.0"] * (not without and bool(note)) == [p.headline for p in found.problems]
    old = Facts([*model_facts(None), *gpu("H200", 90), Fact("package.not-a-package", "0.9", "a test")])
    assert check({"mine": "--plugins"}, parts, old).problems


@pytest.mark.parametrize(("version", "state"), [("none", "is not installed"), ("0.9", "has another version")])
def test_a_missing_package_says_what_is_wrong_and_which_option_needs_it(version, state):
    package = Package("not-a-package", "~=1.0", when="trainer == y", install="pip install it")
    config = load(["--engine", "x", "--trainer", "y"], manifests=[mine(provides=PARTS, packages=(package,))])
    facts = Facts([*config.facts(), Fact("package.not-a-package", version, "a test")])
    (problem,) = [
        p for p in check({"mine": "--plugins"}, config.schema.manifests, facts).problems if "not-a-package" in p.needs
    ]
    assert problem.because == f"not-a-package {state}: pip install it" and problem.choices == ("trainer",)


def test_a_part_that_nothing_asks_for_is_told_and_a_second_one_refused():
    drafts = [mine(name, provides={"decoder": {name: "m:d"}}) for name in ("one", "two")]
    config = load([], manifests=[embedded, workers, *drafts])
    manifests, facts = config.schema.manifests, Facts([*config.facts(), *model_facts(None), *gpu("H200", 90)])
    assert not check({"one": "--plugins"}, manifests, facts).problems
    (problem,) = check({"one": "--plugins", "two": "--plugins"}, manifests, facts).problems
    assert problem.headline == "two brings a second decoder" and "one also provides one" in problem.because
    _, advice = problems([], provides=PARTS | {"decoder": {"d": "m:d"}})
    assert "mine: its part decoder is not used" not in "".join(advice)  # its own engine may ask for it
    other = load(["--engine", "x", "--trainer", "y"], manifests=[embedded, workers, mine(provides=PARTS), drafts[0]])
    told = check({"mine": "--plugins", "one": ""}, other.schema.manifests, Facts(other.facts())).advice
    assert any(line.startswith("one: its part decoder is not used; engine = x") for line in told)


def planned(flags, *manifests):
    config = load(flags, manifests={m.name: m for m in (embedded, workers, *manifests)})
    return prepare(config, catalogue=config.schema.manifests)


def test_values_that_plugins_set_obey_types_bounds_and_the_rules_of_core():
    with pytest.raises(ConfigError, match=r"rollout.batch_size set by mine.* cannot be -3"):
        planned(["--plugins", "mine"], mine(sets={"rollout.batch_size": -3}))
    with pytest.raises(ConfigError, match="a sample that is generated during the training"):
        planned(["--plugins", "mine", "--schedule", "async"], mine(sets={"rollout.max_weight_staleness": 0}))


def test_a_fix_that_cannot_start_is_not_proposed():
    fast = mine(requires=(Rule("train.lr == fast", "it is in a hurry"),))
    with pytest.raises(PlanError) as refused:
        planned(["--plugins", "mine"], fast)
    assert "--lr fast" not in str(refused.value)
    late = mine(requires=(Rule("rollout.max_weight_staleness == 3", "it is late"),))
    with pytest.raises(PlanError) as refused:
        planned(["--plugins", "mine"], late)  # which core takes with --schedule async only
    assert "--max-weight-staleness 3" not in str(refused.value)


def test_hooks_that_there_are_not_and_heavy_manifests_are_found_by_the_checks(install, capsys):
    from miles_core.cli import plan
    from miles_tools.commands import plugins

    hooks = "from miles_core.plugin import hookimpl\nclass H:\n    @hookimpl\n    def on_stepp(self): ...\n"
    text = "from miles_core.plugin import Plugin\nplugin = Plugin('slip', '', '1', '>=0', hooks={'': 'miles_test_slip.hooks:H'}, "
    install("slip", text + "before=('embeded', 'elsewhere'))", hooks)
    with pytest.raises(PluginError, match=r"plugin slip: there is no hook 'on_stepp'; did you mean on_step"):
        plan.run(["--plugins", "slip"])
    with pytest.raises(PluginError) as found:
        plugins.run(["check"])
    assert "there is no hook 'on_stepp'" in str(found.value)
    assert "it comes before embeded, which is not installed; did you mean embedded?" in str(found.value)
    assert "elsewhere" not in str(found.value)  # it may be somebody's


def test_a_manifest_that_imports_torch_is_told(install, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    install(
        "heavy",
        "import sys\nsys.modules['torch'] = None\nfrom miles_core.plugin import Plugin\nplugin = Plugin('heavy', '', '1', '>=0')",
    )
    catalogue = discover()
    assert catalogue["heavy"].name == "heavy" and catalogue.heavy == ["heavy"]


def test_an_error_in_an_advantage_names_plugin_and_estimator(monkeypatch):
    from miles_core.plugin import load as loading

    plugin = mine(provides={"advantage": {"odd": "m:make"}})
    hooks = object.__new__(Hooks)
    hooks._active, hooks._boundaries = [plugin], {}

    def make():
        def advantage(inputs):
            raise ValueError("no such column")

        return advantage

    monkeypatch.setattr(loading, "import_target", lambda *_: make)
    with pytest.raises(ValueError, match="no such column") as caught:
        hooks.make("advantage", "odd")(None)
    assert caught.value.__notes__ == ["in plugin mine, hook make_advantage (odd)"]


def test_lint_without_names_of_hooks_holds_nothing_against_them():
    assert lint(mine(before=("embeded",)), {"embedded": embedded}, Facts([Fact("a", 1, "")])) == [
        "it comes before embeded, which is not installed; did you mean embedded?"
    ]


def test_a_plan_with_a_deleted_hook_names_what_replaces_it(tmp_path):
    from miles_core.cli import plan

    (tmp_path / "old.py").write_text(
        "from miles_core.plugin import hookimpl\n\n@hookimpl\ndef wrap_rollout(run): ...\n"
    )
    with pytest.raises(PluginError) as refused:
        plan.run(["--plugins", str(tmp_path / "old.py")])
    assert "there is no hook 'wrap_rollout'; filter groups with --dynamic-sampling-filter-path" in str(refused.value)
