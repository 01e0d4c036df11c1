"""A plugin that was written for an earlier version is refused with the old name and the new one."""

from importlib import import_module
from importlib.util import find_spec
from inspect import signature

import pytest
from test_discovery import HOOKS, MANIFEST

from miles_core.errors import PluginError
from miles_core.plugin import renamed
from miles_core.plugin.discovery import Catalogue, discover
from miles_core.plugin.load import import_target
from miles_core.plugin.renamed import PUBLIC, explain_old_name, find_new_name


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "from miles_core.plugin import described",
            "imports miles_core.plugin:described, which is now miles_core.plugin:describe_fact",
        ),
        (
            "import miles_core.plugin as m\nm.Ask",
            "imports miles_core.plugin:Ask, which is now miles_core.plugin:GenerationClient",
        ),
        (
            "from miles_core import Plugin, described",
            "imports miles_core:Plugin, which is now miles_core.plugin:Plugin",
        ),
        (
            "from miles_core import described",
            "imports miles_core:described, which is now miles_core.plugin:describe_fact",
        ),
        ("import miles_core\nmiles_core.Batch", "imports miles_core:Batch, which is now miles_core.data:Batch"),
        ("from miles_core.trainer import FurtherLayer", "which is now miles_core.trainer:MtpRequest"),
        ("from miles_core.plugin import oscillates", "imports miles_core.plugin:oscillates, which no longer exists"),
        ("from miles_core.data import Bach", "which does not exist in this version; did you mean Batch"),
        ("import miles_core." + "absent", "absent, which does not exist in this version"),
        (
            "from miles_core.plugin import hookimpl\n@hookimpl(tryfirst=True)\ndef on_step(): ...",
            "passes miles_core.plugin:hookimpl(tryfirst), which is now miles_core.plugin:Plugin(before); change it there",
        ),
        (
            "from miles_core.plugin import Plugin\nPlugin('old', '', '1', '>=0', elsewhere={})",
            "passes miles_core.plugin:Plugin(elsewhere), which is now miles_core.plugin:Plugin(foreign_flags)",
        ),
    ],
)
def test_an_old_name_is_one_sentence_with_the_new_one(install, tmp_path, code, says):
    install("old", code)
    file = tmp_path / "mine.py"
    file.write_text(code)
    attempts = {
        "plugin 'old' (miles-plugin-old 0.1.0): miles_test_old:plugin ": lambda: discover().request("old"),
        f"--plugins {file}: the file ": lambda: Catalogue().add_file(file),
        "plugin old: miles_test_old ": lambda: import_target("old", "miles_test_old:x"),
    }
    for who, attempt in attempts.items():
        with pytest.raises(PluginError) as refused:
            attempt()
        message = str(refused.value)
        assert message.startswith((f"{who}imports ", f"{who}passes "))
        assert says in message and "\n" not in message


def test_a_package_that_moved_moves_its_modules_and_names(monkeypatch):
    monkeypatch.setattr(renamed, "table", lambda package: {"miles_gone": "miles_core", "miles_gone.old": ""})
    assert find_new_name("miles_gone.data:Batch") == "miles_core.data:Batch"
    assert find_new_name("miles_gone.data") == "miles_core.data"
    assert find_new_name("miles_gone.old:x") == "" and find_new_name("miles_gone.old") == ""
    assert "is now miles_core.data" in explain_old_name(ModuleNotFoundError("no", name="miles_gone.data"))


def test_other_errors_are_not_about_old_names():
    assert explain_old_name(ModuleNotFoundError("no", name="somewhere")) == ""
    assert explain_old_name(ImportError("cannot import name 'x' from 'somewhere' (a.py)")) == ""
    assert explain_old_name(AttributeError("'int' object has no attribute 'x'")) == ""
    assert explain_old_name(TypeError("Plugin.__init__() got an unexpected keyword argument 'colour'")) == ""


def test_the_table_names_what_exists_and_nothing_that_still_does():
    tables = [renamed.table(package) for package in ("miles_core", "miles_embedded")]
    assert len(tables[0]) < len(tables[1])
    for old, new in tables[1].items():
        for name, exists in ((old, False), (new, True)):
            module, _, attribute = name.partition(":")
            if name and attribute and (exists or find_spec(module)):
                thing, _, keyword = attribute.rstrip(")").partition("(")
                found = getattr(import_module(module), thing, None)
                here = keyword in signature(found).parameters if keyword and found else found is not None
                assert here is exists, name


def test_a_plugin_for_other_versions_is_refused_before_its_code_runs(install):
    install("later", "raise RuntimeError('imported')", requires=["numpy", "miles_core ~=9.1"])
    with pytest.raises(PluginError) as refused:
        discover().request("later")
    assert str(refused.value).startswith(
        "plugin 'later' (miles-plugin-later 0.1.0): it supports miles-core ~=9.1, and 0.1.0 is installed"
    )


@pytest.mark.parametrize(
    ("line", "fits"),
    [
        ("Miles.Core>=0.1,<9", True),
        ("miles_core", True),
        ("miles-core (>=0.1)", True),
        ("miles-core >=9 ; python_version < '3'", True),
        ("miles-core >=9 ; extra == 'test'", True),
        ("miles-core-tools >=9", True),
        ("miles-core not-a-version", True),  # pip reports it
        ("miles-core>=9", False),
        ("miles-core[test] >=9", False),
        ("miles-core >=9 ; python_version > '3'", False),
    ],
)
def test_the_range_of_core_versions_is_read_from_every_form_of_a_requirement(install, line, fits):
    install("ranged", MANIFEST.format(name="ranged"), HOOKS, requires=[line])
    if fits:
        assert discover().request("ranged") == "ranged"
    else:
        with pytest.raises(PluginError, match=r"it supports miles-core >=9, and 0\.1\.0 is installed"):
            discover().request("ranged")


def test_public_modules_exist():
    for module in PUBLIC:
        assert import_module(module).__all__
