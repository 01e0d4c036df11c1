"""How blocks of pages are run."""

import runpy
import shlex

import pytest

from miles_core.cli.main import main


@pytest.fixture
def shell():
    """``shell(code)``: runs what pages use of a shell, ``python FILE`` and ``miles COMMAND``, in this process: a new one takes seconds."""

    def run(code):
        for line in code.replace("\\\n", " ").splitlines():
            first, *words = shlex.split(line)
            if first == "python":
                runpy.run_path(words[0], run_name="__main__")
            else:
                assert first == "miles" and main(words) == 0, line

    return run
