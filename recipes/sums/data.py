"""Write train.jsonl and eval.jsonl next to this file: sums of two-digit numbers as chat messages."""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    """Write both files."""
    draw = random.Random(0)
    for name, count in (("train.jsonl", 2000), ("eval.jsonl", 64)):
        pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(count)]
        rows = (
            {
                "messages": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
                "answer": str(a + b),
            }
            for a, b in pairs
        )
        (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
