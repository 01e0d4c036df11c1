"""Write train.jsonl next to this file: sums of two-digit numbers with a right and a wrong answer."""

from __future__ import annotations

import json
import random
from pathlib import Path


def main() -> None:
    """Write the file."""
    draw = random.Random(0)
    lines = []
    for _ in range(2000):
        a, b, off = draw.randint(10, 99), draw.randint(10, 99), draw.choice([-10, -2, -1, 1, 2, 10])
        prompt = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
        lines.append(json.dumps({"prompt": prompt, "chosen": str(a + b), "rejected": str(a + b + off)}) + "\n")
    Path(__file__).with_name("train.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
