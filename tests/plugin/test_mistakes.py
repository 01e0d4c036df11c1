"""Typical mistakes of plugin authors are answered with plugin, hook and value."""

import runpy
import warnings
from pathlib import Path

import pytest

from miles_core.contracts.boundaries import BOUNDARIES
from miles_core.contracts.hooks import HOOKS, MAKERS
from miles_testing import toy_run

MISTAKES, HEAD = (runpy.run_path(str(Path(__file__).with_name("mistakes.py")))[n] for n in ("MISTAKES", "HEAD"))


def test_every_hook_has_a_boundary():
    assert set(BOUNDARIES) == set(HOOKS) | {f"make_{kind}" for kind in MAKERS}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_a_mistake_is_answered_with_plugin_hook_and_value(mistake, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(HEAD + mistake.code)
    with warnings.catch_warnings(), pytest.raises(Exception) as raised:
        warnings.simplefilter("error", RuntimeWarning)  # a coroutine that is never awaited
        toy_run([str(file)], tmp_path / "run", **mistake.flags(tmp_path))
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert "plugin mine" in told and mistake.hook in told and mistake.value in told, told


def test_the_same_runs_without_a_mistake(tmp_path):
    assert len(toy_run(directory=tmp_path / "run", steps=1).metrics) == 1
