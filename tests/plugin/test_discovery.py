import asyncio
import subprocess
import sys

import pytest
from published_manifests import facts

from miles_core.contracts.hooks import load_hooks
from miles_core.errors import PluginError
from miles_core.plugin.discovery import Catalogue, discover
from miles_core.plugin.facts import Facts
from miles_core.plugin.resolve import resolve

MANIFEST = """
from miles_core.plugin.manifest import Plugin
plugin = Plugin("{name}", "summary of {name}", "0.1.0", "~=0.1", hooks={{"": "miles_test_{name}.hooks:Hooks"}})
"""
HOOKS = """
from miles_core.plugin.marker import hookimpl
class Hooks:
    @hookimpl
    def on_step(self, metrics):
        metrics["mine/here"] = 1.0
"""


def test_installed_plugins_are_found_by_name_and_source(install):
    install("one", MANIFEST.format(name="one"), HOOKS)
    catalogue = discover()
    assert "one" in catalogue and catalogue.request("one") == "one"
    assert catalogue.sources["one"] == "miles-plugin-one 0.1.0"
    assert catalogue["one"].summary == "summary of one"


def test_scanning_imports_no_plugin(install):
    install("lazy", "raise RuntimeError('imported')")
    catalogue = discover()
    assert "lazy" in catalogue.names
    assert "miles_test_lazy" not in sys.modules


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all' (FILE:1)"),
        ("\ndef f(): raise ValueError\nf()", "ValueError (FILE:2)"),
        ("raise RuntimeError('one\\ntwo')", "RuntimeError: one (FILE:1)"),
        ("import sys\nsys.exit(0)", "SystemExit: 0 (FILE:2)"),
        ("x = (", "SyntaxError: '(' was never closed (__init__.py, line 1)"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_refused_when_asked_for(install, tmp_path, code, error):
    install("bad", code)
    with pytest.raises(PluginError) as refused:
        discover().request("bad")
    message = str(refused.value).replace(str(next(tmp_path.rglob("miles_test_bad/__init__.py"))), "FILE")
    assert message == (
        f"plugin 'bad' (miles-plugin-bad 0.1.0): miles_test_bad:plugin cannot be imported: {error}; correct it, or use another "
        "version (MILES_DEBUG=1 shows the traceback)"
    )


def test_a_broken_plugin_nobody_asked_for_is_kept_aside_with_its_reason(install):
    install("bad", "import not_there_at_all")
    install("good", MANIFEST.format(name="good"), HOOKS)
    catalogue = discover()
    assert "good" in list(catalogue) and "bad" not in list(catalogue)
    assert "not_there_at_all" in catalogue.broken["bad"]
    assert resolve(["good"], catalogue, facts()).plugins[0].source == "miles-plugin-good 0.1.0"


def test_two_distributions_with_one_plugin_name_are_refused_naming_both(install):
    install("twin", MANIFEST.format(name="twin"), HOOKS)
    install("twin", MANIFEST.format(name="twin"), distribution="someone-elses", package="miles_test_other")
    with pytest.raises(PluginError) as refused:
        discover().request("twin")
    assert "miles-plugin-twin 0.1.0 and someone-elses 0.1.0; uninstall one of them" in str(refused.value)


def test_an_unknown_name_suggests_the_nearest_(install):
    install("routing", MANIFEST.format(name="routing"), HOOKS)
    with pytest.raises(PluginError) as refused:
        discover().request("rooting")
    assert str(refused.value) == ("no plugin 'rooting' is installed; did you mean routing?")


def test_what_is_no_manifest_is_refused(install):
    install("odd", "plugin = 3")
    with pytest.raises(PluginError, match=r"miles_test_odd:plugin is int, not a miles_core\.plugin\.Plugin"):
        discover().request("odd")
    install("named", MANIFEST.format(name="otherwise"))
    with pytest.raises(PluginError, match="its manifest calls itself 'otherwise'"):
        discover().request("named")


def write(tmp_path, text, name="my_idea.py"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


FILE_WITH_MANIFEST = (
    """
from miles_core.plugin.manifest import Plugin
plugin = Plugin("mine", "an idea", "0.1", "~=0.1", hooks={"": "Hooks"}, provides={"reward": {"one": "one"}})
def one(run):
    async def score(args, sample):
        return 1.0

    return score
"""
    + HOOKS
)


def loaded(path):
    catalogue = Catalogue()
    name = catalogue.request(path)
    return name, load_hooks(resolve([name], catalogue, Facts()), catalogue), catalogue


def test_a_file_with_a_manifest_names_its_own_classes(tmp_path):
    name, hooks, catalogue = loaded(write(tmp_path, FILE_WITH_MANIFEST))
    metrics = {}
    hooks.on("on_step", run=None, metrics=metrics)
    assert (name, metrics) == ("mine", {"mine/here": 1.0})
    assert asyncio.run(hooks.make("reward", "one", run=None)(None, None)) == 1.0
    assert catalogue.sources["mine"].startswith(f"file:{tmp_path}/my_idea.py sha256:")


def test_a_file_with_only_marked_functions_is_a_plugin_named_like_it(tmp_path):
    path = write(
        tmp_path,
        '''"""Counts steps."""
from miles_core.plugin.marker import hookimpl

@hookimpl
def on_step(metrics):
    metrics["mine/function"] = 1.0

class Also:
    @hookimpl
    def on_step(self, metrics):
        metrics["mine/class"] = 1.0
''',
        "my-idea.py",
    )
    name, hooks, catalogue = loaded(path)
    metrics = {}
    hooks.on("on_step", run=None, metrics=metrics)
    assert (name, metrics) == ("my_idea", {"mine/function": 1.0, "mine/class": 1.0})
    assert catalogue["my_idea"].summary == "Counts steps."


def test_a_file_with_an_unmarked_hook_is_refused(tmp_path):
    with pytest.raises(PluginError, match="on_save is named like a hook but not marked"):
        loaded(
            write(
                tmp_path,
                "from miles_core.plugin import hookimpl\n"
                "@hookimpl\ndef on_step(metrics):\n    pass\n"
                "def on_save(store):\n    pass\n",
            )
        )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import not_there_at_all", "cannot be imported"),
        ("x = 1", "no manifest called 'plugin' and nothing marked"),
        ("plugin = 3", "its 'plugin' is int"),
    ],
)
def test_a_file_that_is_no_plugin_is_refused(tmp_path, text, reason):
    with pytest.raises(PluginError, match=reason):
        Catalogue().request(write(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(PluginError, match="no such file"):
        Catalogue().request(f"{tmp_path}/gone.py")


def test_a_file_may_not_take_an_installed_name(install, tmp_path):
    install("mine", MANIFEST.format(name="mine"), HOOKS)
    with pytest.raises(PluginError, match=r"two plugins are called 'mine': miles-plugin-mine 0\.1\.0 and"):
        discover().request(write(tmp_path, FILE_WITH_MANIFEST))


def test_a_worker_finds_the_file_of_the_plan(tmp_path):
    path = write(tmp_path, FILE_WITH_MANIFEST)
    catalogue = Catalogue()
    plan = resolve([catalogue.request(path)], catalogue, Facts())
    elsewhere = Catalogue()
    for file in plan.files:
        elsewhere.add_file(file)
    plan.check_installed(elsewhere)
    assert elsewhere.sources == catalogue.sources


def test_the_host_imports_neither_torch_nor_transformers(tmp_path):
    code = (
        "import sys\n"
        "from miles_core.config.load import load\n"
        "from miles_core.run.prepare import prepare\n"
        "from miles_core.plugin.render import describe\n"
        "from miles_core.plugin.scan import scan_hooks\n"
        f"plan, _ = prepare(load(['--plugins', {write(tmp_path, FILE_WITH_MANIFEST)!r}]))\n"
        "assert 'on_step: mine' in describe(plan, scan_hooks(plan))\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
