"""``run.state``: values that plugins keep for a run."""

import pytest

from miles_core.contracts.run import RunState, StateKey
from miles_core.errors import MilesError, PluginError
from miles_testing import toy_run

KEY = StateKey[int]()
EMPTY = """
from miles_core.plugin import StateKey, hookimpl

SEEN = StateKey[int]()


@hookimpl
def on_step(run, metrics):
    metrics["seen"] = run.state[SEEN]
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
    state = RunState()
    with pytest.raises(PluginError, match=rf"nothing is stored under the StateKey of {__name__}; store a value first"):
        state[KEY]
    state[KEY] = 3
    assert state[KEY] == 3


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (EMPTY, "plugin mine, hook on_step: nothing is stored under the StateKey of "),
        (FOREIGN, "changed before by plugin mine, hook wrap_weights"),
    ],
)
def test_the_sentence_names_the_plugin(tmp_path, code, says):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(MilesError) as error:
        toy_run([str(tmp_path / "mine.py")])
    assert says in str(error.value) and "\n" not in str(error.value)
