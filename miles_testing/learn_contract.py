"""Contract tests for plugins that wrap what a policy learns from a rollout (``wrap_learn``).

Subclass the contract and name the plugins and options of a toy run that uses the wrapper::

    class TestMyCritic(LearnContract):
        plugins = ("mine",)
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from miles_core.errors import MilesError
from miles_testing.run_contract import RunContract, comparable

#: A runtime with trainers and engines that behave as if they were in other processes, loaded by its path.
_REMOTE = str(files("miles_testing") / "doubles" / "remote.py")
#: As the last plugin of a run it is the innermost wrapper.
_FAILS = """
from miles_core.plugin import MilesError, hookimpl

@hookimpl
def wrap_learn(run):
    def wrap(inner):
        async def learn(samples, step):
            raise MilesError("the trainer of this test fails")

        return learn

    return wrap
"""
#: As the first plugin of a run it is the outermost wrapper.
_WATCHES = """
from miles_core.plugin import MilesError, hookimpl

def copy(samples):
    return [(list(s.tokens), list(s.rollout_log_probs or ())) for s in samples]

@hookimpl
def wrap_learn(run):
    def wrap(inner):
        async def learn(samples, step):
            before = copy(samples)
            learned = await inner(samples, step)
            changed = [s.index for s, old, new in zip(samples, before, copy(samples)) if old != new]
            if changed:
                raise MilesError(f"wrap_learn changed tokens or log-probabilities of the samples {changed}")
            return learned

        return learn

    return wrap
"""


class LearnContract(RunContract):
    """Contract tests for ``wrap_learn``."""

    def test_workers_in_other_processes_learn_the_same(self) -> None:
        """A wrapper that uses more than the methods of ``LearnerHandle`` fails here."""
        here = self.whole_run()
        there = type(self)()
        there.plugins = (*self.plugins, _REMOTE)
        for one, two in zip(here.metrics, there.run(runtime="remote").metrics, strict=True):
            ours, theirs = comparable(one), comparable(two)
            compared = [name for name in ours if "train/" in name or name.startswith("reward/")]
            assert compared and {name: theirs.get(name) for name in compared} == {name: ours[name] for name in compared}

    def test_errors_of_the_trainer_stop_the_run(self, tmp_path: Path) -> None:
        failing = type(self)()
        failing.plugins = (*self.plugins, _write(tmp_path / "fails.py", _FAILS))
        with pytest.raises(MilesError, match="the trainer of this test fails"):
            failing.run()

    def test_it_leaves_what_the_engine_generated(self, tmp_path: Path) -> None:
        """Corrections compare the engine's tokens and log-probabilities; a wrapper trains on copies if it changes them."""
        watched = type(self)()
        watched.plugins = (_write(tmp_path / "watches.py", _WATCHES), *self.plugins)
        watched.run()


def _write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)
