from __future__ import annotations

import gc
import subprocess
import sys
from types import ModuleType

import pytest

from miles_core import __version__
from miles_core.cli import main as cli
from miles_core.errors import ConfigError


@pytest.fixture
def command(monkeypatch):
    """command(function): ``miles doctor`` runs this function instead."""

    def put(function) -> None:
        module = ModuleType("miles_tools.commands.doctor")
        module.run = function
        monkeypatch.setitem(sys.modules, "miles_tools.commands.doctor", module)

    return put


def fail_with(error: BaseException):
    def run(argv):
        raise error

    return run


def test_help_lists_every_command_and_nothing_else(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    names = [
        "train",
        "plan",
        "demo",
        "plugins",
        "convert",
        "verify",
        "report",
        "replay",
        "diff",
        "watch",
        "doctor",
        "completion",
        "simulate",
        "launch",
        "serve",
    ]
    assert sorted(line.split()[0] for line in text.splitlines() if line.startswith("  ")) == sorted(names)


def test_no_command_is_help_and_version_is_one_line(capsys):
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: miles COMMAND")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"miles-core {__version__}\n"


def test_a_command_gets_its_words_and_returns_the_exit_code(command):
    seen = []
    command(lambda argv: seen.append(argv) or 3)
    assert cli.main(["doctor", "--model", "x"]) == 3
    assert seen == [["--model", "x"]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "unknown command 'trian'; did you mean miles train?"),
        (["zzz"], "commands are train, plan"),
        (["--lr", "1"], "a command comes first, e.g. miles train --lr"),
    ],
)
def test_a_wrong_command_is_a_sentence(capsys, words, says):
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == ""


def test_a_users_mistake_is_one_message_and_code_2(command, capsys, monkeypatch):
    monkeypatch.delenv("MILES_DEBUG", raising=False)
    command(fail_with(ConfigError("no such thing")))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "error: no such thing\n"


def test_debug_keeps_the_traceback(command, monkeypatch):
    monkeypatch.setenv("MILES_DEBUG", "1")
    command(fail_with(ConfigError("no such thing")))
    with pytest.raises(ConfigError):
        cli.main(["doctor"])


def test_a_defect_keeps_its_traceback(command):
    command(fail_with(ZeroDivisionError("a defect")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_an_interrupt_is_130(command, capsys):
    command(fail_with(KeyboardInterrupt()))
    assert cli.main(["doctor"]) == 130


def test_an_interrupt_that_python_wraps_is_130(command, capsys):
    def wrapped():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:  # as Python 3.11 does in __set_name__
            raise RuntimeError("Error calling __set_name__") from error

    command(lambda _: wrapped())
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_while_modules_are_imported_is_130():
    code = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
ENTRY = ("miles_core", "miles_core.version", "miles_core.cli", "miles_core.cli.main")

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("miles_") and name not in ENTRY:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
from miles_core.cli.main import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code, "plan"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_cores_commands_read_the_manifests_once(monkeypatch, capsys):
    from miles_core.plugin import discovery

    read = []
    load = discovery.Catalogue._load
    monkeypatch.setattr(discovery.Catalogue, "_load", lambda self, name: read.append(name) or load(self, name))
    assert cli.main(["plan"]) == 0
    capsys.readouterr()
    assert read and sorted(read) == sorted(set(read))


def test_help_loads_only_what_it_needs():
    code = (
        "import sys; from miles_core.cli.main import main; main(['--help']);"
        "names = ('torch', 'transformers', 'pydantic', 'argparse', 'yaml');"
        "print([name for name in names if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "[]\n"


@pytest.mark.parametrize("words", [["doctor", "--model"], ["plugins", "new"], ["report"]])
def test_a_name_that_no_file_has_is_one_sentence(capsys, words):
    assert cli.main([*words, "x" * 300]) == 2
    said = capsys.readouterr().err
    assert "File name too long" in said or "no such directory" in said
    assert "Traceback" not in said


def test_the_processs_own_command_line_defers_garbage_collection(monkeypatch):
    registered = []
    monkeypatch.setattr(cli.atexit, "register", registered.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["miles", "--version"])
    usual = gc.get_threshold()
    try:
        assert cli.main(["--version"]) == 0
        assert gc.get_threshold() == usual and not registered
        assert cli.main() == 0
        assert gc.get_threshold()[0] == 50_000
        assert registered == [gc.freeze]
    finally:
        gc.set_threshold(*usual)
