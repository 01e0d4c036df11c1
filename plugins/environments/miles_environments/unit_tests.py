"""``--rm-type unit_tests``: 1 if the program in a response passes the tests of the label.

The program is the last block of code in the response, or all of it. The label is Python code with ``assert`` statements, which runs after
the program in the same file, in the sandbox of ``--sandbox``.
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

from miles_core.chat import strip_reasoning
from miles_core.data import Sample
from miles_core.plugin import Run, compares_label
from miles_environments.environment import EnvironmentFault
from miles_environments.sandbox import make_sandbox

log = logging.getLogger(__name__)

_BLOCK = re.compile(r"```(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@compares_label
def make_reward(run: Run) -> Any:
    """Provider of ``--rm-type unit_tests``."""
    sandbox = make_sandbox(run.config.environments)

    async def unit_tests(args: Any, sample: Sample) -> float:
        program = find_program(str(sample.metadata.get("answer", sample.response)))
        if not program:
            return 0.0
        tests = sample.label if isinstance(sample.label, str) else "\n".join(map(str, sample.label))
        proof = secrets.token_hex(16)  # printed after the tests only, so that a program that exits early does not pass
        files = {"main.py": f"{program}\n\n{tests}\n\nprint({proof!r})\n"}
        try:
            done = await sandbox.run([sandbox.python, "-I", "main.py"], files)
        except EnvironmentFault as error:
            log.warning("sample %s is masked: %s", sample.index, error)
            sample.remove_sample = True
            return 0.0
        return float(done.code == 0 and done.output.rstrip().endswith(proof))

    return unit_tests


def find_program(text: str) -> str:
    """Return the last block of code in a response, or all of the response if it has none."""
    answer = strip_reasoning(text)
    blocks = _BLOCK.findall(answer)
    return str(blocks[-1] if blocks else answer).strip()
