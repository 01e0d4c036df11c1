"""``run.stash``: values that plugins keep for a run."""

import pytest

from miles_core.contracts.run import Stash, StashKey
from miles_core.errors import MilesError, PluginError
from miles_testing import toy_run

KEY = StashKey[int]()
EMPTY = """
from miles_core.plugin import StashKey, hookimpl

SEEN = StashKey[int]()


@hookimpl
def on_step(run, metrics):
    metrics["seen"] = run.stash[SEEN]
"""
FOREIGN = """
from dataclasses import replace

from miles_core.plugin import hookimpl


@hookimpl
def wrap_weights():
    def wrap(inner):
        def units():
            for unit in inner():
                yield replace(unit, tensors={f"their.{name}": tensor for name, tensor in unit.tensors.items()})

        return units

    return wrap
"""


def test_a_key_names_the_module_that_made_it():
    stash = Stash()
    with pytest.raises(PluginError, match=rf"nothing is stored under the StashKey of {__name__}; store a value first"):
        stash[KEY]
    stash[KEY] = 3
    assert stash[KEY] == 3


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (EMPTY, "plugin mine, hook on_step: nothing is stored under the StashKey of "),
        (FOREIGN, "changed before by plugin mine, hook wrap_weights"),
    ],
)
def test_the_sentence_names_the_plugin(tmp_path, code, says):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(MilesError) as error:
        toy_run([str(tmp_path / "mine.py")])
    assert says in str(error.value) and "\n" not in str(error.value)
