import asyncio
import sys

import pytest
import torch

from miles_core.contracts.hooks import HookSpecs, load_hooks
from miles_core.contracts.trainer import Loss
from miles_core.errors import PluginError
from miles_core.plugin.core import CORE
from miles_core.plugin.facts import Fact, Facts, State
from miles_core.plugin.implementation import read_specs
from miles_core.plugin.load import compose
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.marker import hookimpl
from miles_core.plugin.resolve import resolve
from miles_embedded import plugin as EMBEDDED

HERE = "miles_loaded_by_test"


@pytest.fixture
def load(monkeypatch):
    """``load({"a": Class, ...})`` resolves one plugin for each class and loads their hooks."""

    def go(classes, config=None, hooks=None, facts=None, options=None, **parts):
        module = type(sys)(HERE)
        manifests = {}
        for name, holder in classes.items():
            setattr(module, name, holder)
            targets = hooks or {"": f"{HERE}:{name}"}
            manifests[name] = Plugin(name, "test", "1.0", "~=0.1", hooks=targets, config=options, **parts)
        monkeypatch.setitem(sys.modules, HERE, module)
        plan = resolve(list(classes), manifests, facts or Facts())
        return load_hooks(plan, manifests, config, facts=facts)

    return go


def recording(mark, log):
    class Recorder:
        @hookimpl
        def on_step(self, metrics):
            log.append(mark)
            metrics[f"{mark}/seen"] = 1.0

        @hookimpl
        def wrap_loss(self, run):
            return lambda inner: (
                lambda x: Loss(inner(x).value, {**inner(x).metrics, f"{mark}/n": (len(inner(x).metrics), 1)})
            )

    return Recorder


def test_plugins_are_called_in_plan_order(load):
    log = []
    hooks = load({"a": recording("a", log), "b": recording("b", log)})
    metrics = {}
    hooks.on("on_step", run=None, metrics=metrics)
    assert log == ["a", "b"]
    assert metrics == {"a/seen": 1.0, "b/seen": 1.0}
    assert hooks.implemented["on_step"] == ("a", "b")
    loss = Loss(torch.zeros((), requires_grad=True))
    assert compose(lambda x: x, hooks.chain("wrap_loss", run=None, policy=None))(loss).metrics == {
        "b/n": (0, 1),
        "a/n": (1, 1),
    }


def test_every_hook_can_be_told_and_every_spec_is_known(load):
    hooks = load({})
    for name, arguments in read_specs(HookSpecs).items():
        given = dict.fromkeys(arguments)
        if name.startswith("on_"):
            hooks.on(name, **given)
        else:
            assert hooks.chain(name, **given) == []
    assert set(hooks.implemented) == {n for n in vars(HookSpecs) if n.startswith(("on_", "wrap_"))}


def test_a_hook_called_with_other_arguments_is_a_defect(load):
    with pytest.raises(TypeError, match="on_step is called with"):
        load({}).on("on_step", run=None)
    with pytest.raises(TypeError, match="there is no hook 'on_stpe'; did you mean on_stop or on_step"):
        load({}).on("on_stpe")


def test_a_class_may_take_its_options(load):
    class Tells:
        def __init__(self, options):
            self.options = options

        @hookimpl
        def on_step(self, metrics):
            metrics["a/level"] = self.options

    metrics = {}
    load({"a": Tells}, {"a": 3.0}).on("on_step", run=None, metrics=metrics)
    assert metrics == {"a/level": 3.0}


def test_an_exception_names_plugin_and_hook(load):
    class Fails:
        @hookimpl
        def on_step(self, run):
            raise ValueError("bad step")

        @hookimpl
        def wrap_loss(self):
            raise ValueError("bad chain")

    hooks = load({"a": Fails})
    with pytest.raises(ValueError, match="bad step") as raised:
        hooks.on("on_step", run=None, metrics={})
    assert raised.value.__notes__ == ["in plugin a, hook on_step"]
    with pytest.raises(ValueError, match="bad chain") as raised:
        hooks.chain("wrap_loss", run=None, policy=None)
    assert raised.value.__notes__ == ["in plugin a, hook wrap_loss"]


def test_a_wrap_hook_may_stay_out_and_must_not_return_something_else(load):
    class Out:
        @hookimpl
        def wrap_loss(self):
            return None

    class Wrong:
        @hookimpl
        def wrap_loss(self):
            return 3

    assert load({"a": Out}).chain("wrap_loss", run=None, policy=None) == []
    with pytest.raises(PluginError, match="plugin a: wrap_loss returned 3, not a function"):
        load({"a": Wrong}).chain("wrap_loss", run=None, policy=None)


def guarded(load, body, name="on_step", mark=hookimpl):
    holder = type("Hooks", (), {name: mark(body) if mark else body})
    with pytest.raises(PluginError) as refused:
        load({"a": holder})
    return str(refused.value)


def test_an_unknown_hook_is_refused_with_the_nearest(load):
    message = guarded(load, lambda self, run: None, name="on_stpe")
    assert (
        message == "plugin a, Hooks.on_stpe: there is no hook 'on_stpe'; did you mean on_stop or on_step or on_sample?"
    )


def test_a_deleted_hook_is_refused_with_what_to_do_instead(load):
    assert guarded(load, lambda self, run: None, name="on_weights_synced") == (
        "plugin a, Hooks.on_weights_synced: there is no hook 'on_weights_synced'; "
        "a check (make_check) is called after each weight sync"
    )


def test_an_unmarked_method_named_like_a_hook_is_refused(load):
    message = guarded(load, lambda self, run: None, mark=None)
    assert "plugin a, Hooks.on_step is named like a hook but not marked: put @hookimpl above it" in message


def test_a_default_argument_is_refused(load):
    message = guarded(load, lambda self, metrics=None: None)
    assert "plugin a, Hooks.on_step: argument 'metrics' has a default" in message


def test_an_argument_the_hook_lacks_is_refused(load):
    message = guarded(load, lambda self, metric: None)
    assert message == "plugin a, Hooks.on_step: hook on_step has no argument 'metric'; did you mean metrics?"


def test_catch_all_arguments_are_refused(load):
    assert "takes *kw: name the arguments you use" in guarded(load, lambda self, **kw: None)


def test_a_class_without_hooks_is_refused(load):
    with pytest.raises(PluginError, match="plugin a, Empty: implements no hook"):
        load({"a": type("Empty", (), {})})


def test_a_class_with_more_arguments_than_its_options_is_refused(load):
    class Greedy:
        def __init__(self, options, run):
            self.run = run

    with pytest.raises(PluginError, match="plugin a: Greedy takes options, run; it may take its options, no more"):
        load({"a": Greedy})


def test_a_module_that_cannot_be_imported_is_named(load, install):
    install("a", "", hooks="import not_there_at_all\n")
    with pytest.raises(PluginError, match=r"plugin a: miles_test_a\.hooks cannot be imported") as refused:
        load({"a": object}, hooks={"": "miles_test_a.hooks:Hooks"})
    assert "ModuleNotFoundError: No module named 'not_there_at_all'" in str(refused.value)


def test_a_class_that_is_not_there_is_told_with_the_nearest(load):
    with pytest.raises(PluginError, match=f"plugin a: {HERE} has no 'Aa'; did you mean a"):
        load({"a": object}, hooks={"": f"{HERE}:Aa"})


def test_a_condition_unknown_on_the_driver_is_decided_on_the_worker(load):
    class Fast:
        @hookimpl
        def on_start(self):
            pass

    hooks = {"gpu.sm >= 90": f"{HERE}:a"}
    unknown = Facts([Fact("gpu.sm", None, "declared", State.UNKNOWN)])
    with pytest.raises(PluginError, match=r"its hooks depend on 'gpu\.sm >= 90', which is not known on this worker"):
        load({"a": Fast}, hooks=hooks, facts=unknown)
    plan = resolve(["a"], {"a": Plugin("a", "", "1", "~=0.1", hooks=hooks)}, unknown)
    for sm, users in ((80, ()), (90, ("a",))):
        worker = Facts([Fact("gpu.sm", sm, "detected")])
        manifests = {"a": Plugin("a", "", "1", "~=0.1", hooks=hooks)}
        assert load_hooks(plan, manifests, facts=worker).implemented["on_start"] == users


def build(run, extra=None):
    return (run, extra)


def test_parts_are_made_by_name_with_the_arguments_they_take(load, monkeypatch):
    module = type(sys)("miles_parts_by_test")
    module.build = build
    monkeypatch.setitem(sys.modules, "miles_parts_by_test", module)
    provides = {kind: {"mine": "miles_parts_by_test:build"} for kind in ("engine", "decoder")}
    hooks = load({"a": recording("a", [])}, provides=provides, formats={"f": "miles_parts_by_test:build"})
    assert hooks.make("decoder", "mine", run="run", policy="policy") == ("run", None)
    assert hooks.find_provided("engine") == ("mine",) and hooks.provider("engine", "mine") == "a"
    assert hooks.format("f") is build
    with pytest.raises(PluginError, match="no active plugin provides the engine 'mien'; did you mean mine"):
        hooks.make("engine", "mien", run=None)
    with pytest.raises(PluginError, match="no active plugin has the number format 'g'; there are: f"):
        hooks.format("g")


def test_a_part_that_fails_to_build_names_its_plugin(load, monkeypatch):
    module = type(sys)("miles_parts_by_test")
    module.build = lambda run: 1 / 0
    monkeypatch.setitem(sys.modules, "miles_parts_by_test", module)
    hooks = load({"a": recording("a", [])}, provides={"engine": {"mine": "miles_parts_by_test:build"}})
    with pytest.raises(ZeroDivisionError) as raised:
        hooks.make("engine", "mine", run=None)
    assert raised.value.__notes__ == ["in plugin a, hook make_engine (mine)"]


def test_a_part_of_core_that_fails_when_it_is_called_blames_no_plugin(load, monkeypatch):
    async def check(parts):
        raise OSError("no memory")

    monkeypatch.setattr("miles_core.defaults.make_first_sync_check", lambda run: check)
    guarded = load({"a": recording("a", [])}).make("check", "first_sync", run=None)
    with pytest.raises(OSError, match="no memory") as raised:
        asyncio.run(guarded(None))
    assert not hasattr(raised.value, "__notes__")


def test_everything_core_declares_exists():
    import importlib

    from miles_core.data.field import CORE_FIELDS
    from miles_embedded.engine.engine import EmbeddedEngine
    from miles_embedded.trainer.trainer import EmbeddedTrainer

    for parts in CORE.provides.values():
        for target in parts.values():
            module, _, name = target.partition(":")
            assert callable(getattr(importlib.import_module(module), name)), target
    assert CORE.fields == CORE_FIELDS
    assert EmbeddedEngine.capabilities <= set(EMBEDDED.capabilities["engine"])
    assert EmbeddedTrainer.capabilities <= set(EMBEDDED.capabilities["trainer"])


def test_options_come_from_the_configuration_or_are_defaults(load):
    from dataclasses import dataclass

    from miles_core.config.load import load as load_config
    from miles_core.plugin.options import option

    @dataclass(frozen=True)
    class Options:
        level: float = option(1.0, help="a level", flag="--a-level")

    class Tells:
        def __init__(self, options):
            self.level = options.level

        @hookimpl
        def on_step(self, metrics):
            metrics["a/level"] = self.level

    manifest = Plugin("a", "test", "1.0", "~=0.1", config=Options)
    chosen = load_config(["--plugins", "a", "--a-level", "2.5"], manifests=[manifest])
    for config, level in ((chosen, 2.5), (None, 1.0), ({"a": Options(3.0)}, 3.0)):
        metrics = {}
        load({"a": Tells}, config, options=Options).on("on_step", run=None, metrics=metrics)
        assert metrics == {"a/level": level}
