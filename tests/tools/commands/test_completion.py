"""The scripts know what can be typed, and the shells that are here read them."""

import shutil
import subprocess

import pytest

from miles_core.cli.commands import Commands
from miles_tools.commands import completion


@pytest.fixture(scope="module")
def words():
    return completion.words()


def completed(words, line):
    """What bash offers at the end of a line."""
    script = f"""{completion._bash(words)}
COMP_WORDS=({line}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); _miles; printf '%s\\n' "${{COMPREPLY[@]}}" """
    return subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True).stdout.split()


def test_commands_flags_and_values_are_completed(words):
    assert completed(words, "miles pl") == ["plan", "plugins"]
    assert completed(words, "miles train --rollout-batch-s") == ["--rollout-batch-size"]
    assert completed(words, "miles train --dry") == ["--dry-run"]
    assert "--hardware" in completed(words, "miles plan --ha") and "--lr" in completed(words, "miles plan --l")
    assert completed(words, "miles train --engine embe") == ["embedded"]
    assert {"bf16", "fp8"} <= set(completed(words, "miles convert --to b") + completed(words, "miles convert --to fp"))
    assert completed(words, "miles report --l") == []  # it takes no flags of a training
    assert set(words.flags) == set(Commands.installed())


@pytest.mark.parametrize(("shell", "check"), [("bash", "-n"), ("zsh", "-n"), ("fish", "--no-execute")])
def test_shells_read_their_scripts(words, shell, check, tmp_path):
    script = tmp_path / "script"
    script.write_text(completion.SCRIPTS[shell](words))
    assert "rollout-batch-size" in script.read_text() and "embedded" in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, check, str(script)], check=True)
