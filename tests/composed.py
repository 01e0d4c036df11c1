"""A tool, an agent and an environment for ``test_composition``."""

import json
import urllib.request

from miles_environments import Environment, Task


async def look(where: str) -> str:
    """Look somewhere."""
    return f"nothing {where}"


def agent(task):
    """Ask the model once."""
    body = json.dumps({"messages": [{"role": "user", "content": task.row["prompt"]}]}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)):
        return None


class Letters(Environment):
    """Rewards answers by the sum of their characters."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def task(self, number: int, level: int) -> Task:
        return Task("abcdefgh"[number % 8])

    def score(self, number: int, level: int, answers):
        return [sum(map(ord, answer or "")) % 7 / 7 for answer in answers]
