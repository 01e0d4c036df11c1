"""Write train.jsonl next to this file: answers that follow the instruction "Answer with the number only.", and answers that do not."""

from __future__ import annotations

import json
import random
from pathlib import Path

SENTENCES = (
    "The answer is {}.",
    "{} + {} is {}.",
    "That would be {}!",
    "Let me add these numbers: the sum is {}.",
    "{}, I think.",
)


def main() -> None:
    """Write the file."""
    draw = random.Random(0)
    lines = []
    for _ in range(2000):
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        prompt = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
        sentence = draw.choice(SENTENCES)
        rejected = sentence.format(*(a, b, a + b)[-sentence.count("{}") :])
        lines.append(json.dumps({"prompt": prompt, "chosen": str(a + b), "rejected": rejected}) + "\n")
    Path(__file__).with_name("train.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
