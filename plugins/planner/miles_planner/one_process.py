"""Runs in one process, which have no layout: for models that fit in no layout of several processes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from miles_core.config.load import load
from miles_core.plugin import ConfigError
from miles_core.plugin.check import check
from miles_core.plugin.fixes import find_fixes
from miles_core.run.prepare import catalogue_for, facts_for
from miles_planner.packages import read_option

#: The parts of a run in one process.
INLINE = {"--runtime": "inline", "--engine": "embedded", "--trainer": "embedded"}


def find_in_one_process(argv: Sequence[str], given: Sequence[str]) -> Iterator[str]:
    """Yield the accepted commands of a run in one process: with the options of ``argv``, or with those that the plan proposes to change.

    Args:
        argv: options of a run; if they select another part, nothing is found.
        given: facts to plan with, ``NAME=VALUE``.
    """
    if any(read_option(argv, flag) not in (None, part) for flag, part in INLINE.items()):
        return
    words = [
        *argv,
        *(word for flag, part in INLINE.items() if read_option(argv, flag) is None for word in (flag, part)),
    ]
    try:
        config = load(words)
    except ConfigError:  # the options loaded with other parts, so one of them belongs to these
        return
    catalogue, facts = catalogue_for(config), facts_for(config, given)
    result = check(config.requested, catalogue, facts)
    fixes = [fix.text for fix in find_fixes(config.requested, catalogue, facts, result)] if result.problems else [""]
    for text in fixes:
        if not text or (text.startswith("--") and ", and " not in text):
            yield f"miles train {shlex.join(words)} {text}".rstrip()
