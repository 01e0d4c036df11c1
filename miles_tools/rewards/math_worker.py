"""The process that calls math-verify: one JSON request a line in, one JSON answer a line out.

math-verify stops a computation that runs away with a signal, and signals only reach the main thread; so it gets a
process of its own, whose main thread does nothing else and which can be killed. Started by ``math_verifier``.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

SECONDS_PER_STEP = 4
MEMORY_BYTES = 4 * 2**30
DELIMITED = re.compile(r"\$|\\boxed|\\\[|\\\(")


def read_gold(label: str) -> list[Any]:
    """Parse a label; bare LaTeX (no dollar signs, no box) is read as mathematics, then as plain text."""
    from math_verify import parse

    found: list[Any] = []
    if not DELIMITED.search(label):
        found = parse(f"${label}$", parsing_timeout=SECONDS_PER_STEP)
    return found or list(parse(label, parsing_timeout=SECONDS_PER_STEP))


def judge(label: str, response: str) -> dict[str, bool]:
    """``readable``: the label is mathematics; ``equal``: the response's answer equals it."""
    from math_verify import parse, verify

    gold = read_gold(label)
    if all(isinstance(item, str) for item in gold):  # strings are what could not be parsed
        return {"readable": False, "equal": False}
    answer = parse(response, parsing_timeout=SECONDS_PER_STEP)
    return {"readable": True, "equal": bool(answer) and verify(gold, answer, timeout_seconds=SECONDS_PER_STEP)}


def main() -> None:
    """Answer requests until the input ends."""
    try:
        import resource
    except ImportError:  # not on this platform: the parent's deadline is the only limit
        pass
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS, (MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES), hard)
        )
    import math_verify  # noqa: F401  (the slow import happens before we say we are ready)

    logging.disable(logging.CRITICAL)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = judge(request["label"], request["response"])
        except (Exception, MemoryError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
