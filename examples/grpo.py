"""GRPO written with the primitives of a policy: the loop of ``miles train`` with the same numbers.

python examples/grpo.py MODEL PROMPTS.jsonl RUN_DIRECTORY

The reward is the fraction of even token ids in a response. ``tests/test_primitives.py`` compares metrics and weights with those of ``miles train``
with the same options.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.api import open_run

GROUP, PROMPTS = 4, 2
OPTIONS: dict[str, Any] = {"rollout_max_response_len": 4, "lr": 1e-3, "log_level": "warning"}


def reward(tokens: list[int]) -> float:
    """Return the fraction of even ids."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


async def train(model: str, prompts: str, directory: str, steps: int) -> list[dict[str, float]]:
    """Run the loop; returns the metrics of each step, and exports the model to ``DIRECTORY/export``."""
    rows = [json.loads(line)["input"] for line in Path(prompts).read_text().splitlines()]
    history, number = [], 0
    async with open_run(hf_checkpoint=model, save=directory, **OPTIONS) as run:
        policy = run.policies["policy"]
        for step in range(steps):
            # sample a group of responses to each prompt; a response's number is the seed of its random numbers
            asked = []
            for i in range(PROMPTS):
                prompt = run.run.render(rows[(step * PROMPTS + i) % len(rows)])
                asked.append(policy.sample(prompt, GROUP, first=number))
                number += GROUP
            groups = await asyncio.gather(*asked)
            # advantage of a response: its reward, centred and scaled in its group
            for group in groups:
                rewards = np.array([reward(list(sample.tokens[sample.prompt_length :])) for sample in group])
                scores = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                for sample, score in zip(group, scores, strict=True):
                    n = sample.response_length
                    sample.fields = {"advantages": [score] * n, "loss_weight": [1 / (n * GROUP * PROMPTS)] * n}
            # one optimizer step, and the new weights for the next samples
            gradients = await policy.forward_backward([*chain(*groups)], "policy")
            metrics = await policy.optimizer_step()
            await policy.sync()
            history.append(gradients.metrics | metrics)
        await policy.export(f"{directory}/export")
    return history


if __name__ == "__main__":
    for record in asyncio.run(train(sys.argv[1], sys.argv[2], sys.argv[3], steps=10)):
        print({name: round(record[name], 4) for name in ("train/loss", "train/grad_norm", "train/lr")})
