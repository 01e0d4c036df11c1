"""Write train.jsonl, eval.jsonl and calls.jsonl (written calls, for the warm start) next to this file."""

from __future__ import annotations

import json
import random
from pathlib import Path

from miles_tool_calls.conversation import INSTRUCTIONS, result_messages
from miles_tool_calls.functions import load_functions

HERE = Path(__file__).parent


def main() -> None:
    """Write the files."""
    draw = random.Random(0)
    tools = load_functions((str(HERE / "tools.py"),))
    schemas = "\n".join(json.dumps(tool.schema["function"]) for tool in tools)
    system = {"role": "system", "content": INSTRUCTIONS.format(schemas=schemas)}
    for name, count in (("train.jsonl", 4096), ("eval.jsonl", 128), ("calls.jsonl", 256)):
        lines = []
        for _ in range(count):
            a, b = draw.randint(100, 999), draw.randint(100, 999)
            user = {"role": "user", "content": f"What is {a} * {b}?"}
            if name == "calls.jsonl":
                lines += _write_call([system, user], a, b)
            else:
                lines.append({"prompt": [user], "label": str(a * b)})
        (HERE / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _write_call(start: list[dict[str, str]], a: int, b: int) -> list[dict[str, object]]:
    """Return the two answers of a conversation: the call, and the final answer."""
    call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
    asked = f"<tool_call>\n{call}\n</tool_call>"
    result = result_messages(["multiply"], ["call00000"], [str(a * b)], "text")
    whole = [*start, {"role": "assistant", "content": asked}, *result]
    return [{"prompt": start, "response": asked}, {"prompt": whole, "response": str(a * b)}]


if __name__ == "__main__":
    main()
