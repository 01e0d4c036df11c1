"""A run that ends before its last step never has status 0, whatever the code of users and plugins calls."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from miles_core.cli.main import main
from miles_testing.toy import toy_arguments

GUARDED = """
import os, subprocess, sys
from miles_core.run.exits import report_exits
with report_exits(lambda what: print("ended by", what)):
    {call}
    print("goes on")
"""


@pytest.mark.parametrize(
    ("call", "status", "words"),
    [
        ("os._exit(0)", 1, "ended by os._exit(0) at <string>:5"),
        ("os._exit(7)", 7, "ended by os._exit(7) at <string>:5"),
        ("os.execv('/bin/true', ['true'])", 1, "ended by os.execv('/bin/true') at <string>:5"),
        ("os.execlp('true', 'true')", 1, "ended by os.exec"),
        ("os.waitpid(os.fork() or os._exit(0), 0)", 0, "goes on"),
        ("os.waitpid(os.fork() or os.execv('/bin/true', ['true']), 0)", 0, "goes on"),
        ("subprocess.run(['true'], check=True)", 0, "goes on"),
    ],
)
def test_functions_that_end_the_process_at_once(call, status, words):
    done = subprocess.run(
        [sys.executable, "-uc", GUARDED.format(call=call)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status and words in done.stdout, done.stderr


def test_a_reward_that_ends_the_process_does_not_end_as_success(tmp_path):
    (tmp_path / "judge.py").write_text(
        "import os\ndef reward(args, sample):\n    if sample.index == 10:\n        os._exit(0)\n    return 1.0\n"
    )
    words = toy_arguments(
        directory=tmp_path / "run", steps=3, save_interval=1, custom_rm_path=tmp_path / "judge.py", log_level="info"
    )
    done = subprocess.run(
        [sys.executable, "-m", "miles_core", "train", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    why = "code of the run ended the process: os._exit(0) at "
    assert why in done.stderr and "judge.py:4" in done.stderr and "to continue: miles train --load" in done.stderr
    ending = json.loads((tmp_path / "run/ending.json").read_text())
    assert why in ending["why"] and (ending["step"], ending["of"]) == (1, 3)


PLUGIN = """
import sys
from miles_core.plugin import hookimpl

class Odd:
    @hookimpl
    def {hook}:
        {body}
"""


@pytest.mark.parametrize(
    ("hook", "body", "words"),
    [
        ("on_step(self, run, metrics)", "sys.exit(0)", "called sys.exit(0)"),
        ("on_start(self, run)", "sys.exit()", "called sys.exit(None)"),
        ("on_sample(self, run, sample)", "sys.exit(0)", "called sys.exit(0)"),
        ("on_step(self, run, metrics)", "raise BrokenPipeError(32, 'Broken pipe')", "pipe or connection is closed"),
    ],
)
def test_hooks_that_exit(tmp_path, capsys, hook, body, words):
    (tmp_path / "odd.py").write_text(PLUGIN.format(hook=hook, body=body))
    arguments = toy_arguments(plugins=[str(tmp_path / "odd.py")], directory=tmp_path / "run", steps=2)
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and "odd.py:8" in error
    assert words in json.loads((tmp_path / "run/ending.json").read_text())["why"]


def test_files_that_exit_when_they_are_loaded(tmp_path, capsys):
    (tmp_path / "odd.py").write_text("import sys\nsys.exit(0)\n")
    assert main(["train", *toy_arguments(plugins=[str(tmp_path / "odd.py")], directory=tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "SystemExit: 0" in error and "odd.py:2" in error
