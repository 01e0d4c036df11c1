"""An agent that asks the model for a sum through the OpenAI API, and asks again if the answer is not a number."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def solve(task: Any) -> dict[str, float]:
    """Return the reward: 1 for the right sum."""
    text = str(task.row["prompt"])
    for _ in range(2):
        answer = _ask(task, text)
        if answer.isdigit():
            break
    return {"reward": float(answer == str(task.row["label"]))}


def _ask(task: Any, text: str) -> str:
    body = json.dumps({"model": task.model, "prompt": text, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)) as reply:
        return str(json.loads(reply.read())["choices"][0]["message"]["content"]).strip()
