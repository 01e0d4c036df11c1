"""A tool and an environment for ``test_composition``."""

from miles_environments import Environment, Task


async def look(where: str) -> str:
    """Look somewhere."""
    return f"nothing {where}"


class Letters(Environment):
    """Rewards answers by the sum of their characters."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def task(self, number: int, level: int) -> Task:
        return Task("abcdefgh"[number % 8])

    def score(self, number: int, level: int, answers):
        return [sum(map(ord, answer or "")) % 7 / 7 for answer in answers]
