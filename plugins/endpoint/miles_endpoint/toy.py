"""The agent of a toy run."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def agent(task: Any) -> None:
    """Ask the model once."""
    body = json.dumps({"messages": [{"role": "user", "content": task.row["prompt"]}]}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)):
        pass
