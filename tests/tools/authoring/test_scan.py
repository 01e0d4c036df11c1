import sys

import pytest
from published_manifests import facts

from miles_core.errors import PluginError
from miles_core.plugin.discovery import discover
from miles_core.plugin.render import chains
from miles_core.plugin.resolve import resolve
from miles_core.plugin.scan import find_marked, hooks_of, scan_hooks

MANIFEST = """
from miles_core.plugin.manifest import Plugin
plugin = Plugin("{name}", "", "0.1.0", "~=0.1", hooks={{"": "miles_test_{name}.hooks:Hooks"}})
"""
HOOKS = """
import a_library_that_is_not_installed
from miles_core.plugin import hooks
from miles_core.plugin.marker import hookimpl

class Base:
    @hookimpl
    def wrap_forward(self, run, policy):
        return None

class Hooks(Base):
    @hooks.hookimpl
    def on_step(self, metrics):
        pass

    @hookimpl
    def on_save(self, store):
        pass

    def helper(self):
        pass
"""


def test_hooks_are_read_from_source_without_importing(install):
    for name in ("red", "blue"):
        find_marked.cache_clear()
        install(name, MANIFEST.format(name=name), HOOKS)
    catalogue = discover()
    assert set(hooks_of(catalogue["red"])) == {"wrap_forward", "on_step", "on_save"}
    found = scan_hooks(resolve(["red", "blue"], catalogue, facts()))
    assert found == dict.fromkeys(("wrap_forward", "on_step", "on_save"), ("red", "blue"))
    assert chains(found) == ["wrap_forward: core <- blue <- red (outermost)"]
    assert "miles_test_red.hooks" not in sys.modules


def test_a_class_that_inherits_from_elsewhere_is_imported(install):
    find_marked.cache_clear()
    base = "from miles_core.plugin import hookimpl\n\n\nclass Base:\n"
    base += "    @hookimpl\n    def on_stop(self):\n        pass\n"
    install(
        "green",
        MANIFEST.format(name="green") + base,
        "from miles_test_green import Base\nclass Hooks(Base):\n    pass\n",
    )
    assert hooks_of(discover()["green"]) == ("on_stop",)


def test_hooks_that_cannot_be_found_are_told(install):
    find_marked.cache_clear()
    install("gray", MANIFEST.format(name="gray"))
    with pytest.raises(
        PluginError, match=r"plugin gray: its hooks are in miles_test_gray\.hooks, which cannot be found"
    ):
        hooks_of(discover()["gray"])
