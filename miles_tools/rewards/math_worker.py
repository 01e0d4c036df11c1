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


def read(text: str) -> list[Any]:
    """Parse a text: what a box holds, or else the mathematics that math-verify finds in it."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return list(parse(text, targets, parsing_timeout=SECONDS_PER_STEP))


def read_gold(label: str) -> list[Any]:
    """Parse a label; bare LaTeX (without dollar signs or box) is parsed as mathematics first, then as plain text."""
    return ([] if DELIMITED.search(label) else read(f"${label}$")) or read(label)


def judge(label: str, response: str) -> dict[str, bool]:
    """Return ``readable`` (the label is mathematics) and ``equal`` (the response's answer equals the label).

    math-verify compares with six decimal places as soon as one side has a decimal number. A label without one is an exact value, so the
    decimal numbers of the answer are exact, too: .333333 is not 1/3, and .5 is 1/2.
    """
    from math_verify import verify
    from sympy import Basic, Float, MatrixBase, Rational

    gold = read_gold(label)
    if all(isinstance(item, str) for item in gold):  # strings could not be parsed as mathematics
        return {"readable": False, "equal": False}
    answer = read(response)
    if not any(isinstance(item, Basic | MatrixBase) and item.has(Float) for item in gold):
        answer = [
            item.xreplace({number: Rational(str(number)) for number in item.atoms(Float)})
            if isinstance(item, Basic | MatrixBase)
            else item
            for item in answer
        ]
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
