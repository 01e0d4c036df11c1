"""Worker process that calls math-verify: reads one JSON request per line and writes one JSON answer per line.

math-verify limits the time of a computation with a signal, which only the main thread receives. It therefore runs in the main thread
of a separate process, which can also be killed. ``math_verifier`` starts this process.
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
    """Parse a label; bare LaTeX (without dollar signs or box) is parsed as mathematics first, then as plain text."""
    from math_verify import parse

    found: list[Any] = []
    if not DELIMITED.search(label):
        found = parse(f"${label}$", parsing_timeout=SECONDS_PER_STEP)
    return found or list(parse(label, parsing_timeout=SECONDS_PER_STEP))


def judge(label: str, response: str) -> dict[str, bool]:
    """Return ``readable`` (the label is mathematics) and ``equal`` (the response's answer equals the label)."""
    from math_verify import parse, verify

    gold = read_gold(label)
    if all(isinstance(item, str) for item in gold):  # strings could not be parsed as mathematics
        return {"readable": False, "equal": False}
    answer = parse(response, parsing_timeout=SECONDS_PER_STEP)
    return {"readable": True, "equal": bool(answer) and verify(gold, answer, timeout_seconds=SECONDS_PER_STEP)}


def main() -> None:
    """Process requests until the input ends."""
    try:
        import resource
    except ImportError:  # not on this platform: the parent's deadline is the only limit
        pass
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS, (MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES), hard)
        )
    import math_verify  # noqa: F401  (the slow import happens before this process reports that it is ready)

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
