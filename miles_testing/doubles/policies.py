"""Options of a run with several policies that share an engine of another program, with one adapter each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TURNS = """
async def generate(args, sample, sampling_params):
    names = ["solver", "judge"]
    sample.policy = names[sample.group_index % 2]
    await args.ask(policy="teacher")
    turn = await args.ask(policy=sample.policy)
    sample.tokens, sample.response_length = turn.tokens, len(turn.response.tokens)
    return sample
"""


def two_policies(directory: Path) -> dict[str, Any]:
    """Return the options for two trained policies with adapters of different ranks, and one that generates with the base alone.

    Args:
        directory: receives the file with the rollout function.
    """
    file = directory / "turns.py"
    file.write_text(_TURNS, encoding="utf-8")
    policies = {"solver": {"lora": {"rank": 4}}, "judge": {}, "teacher": {"role": "frozen", "generates": True}}
    return {"policies": policies, "custom_generate_function_path": file, "verify_logprobs": True}
