"""Evaluation: held-out prompts through the same generation and reward, never trained on.

Every evaluation uses the same random numbers, so a change of the score is a change of the weights.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import TYPE_CHECKING

from miles_core.rollout.prompt import Prompt

if TYPE_CHECKING:
    from miles_core.rollout.collect import Group
    from miles_core.run import Run

#: Evaluation samples are numbered from here, so that they share no random number with training samples.
FIRST_INDEX = 1 << 40


async def evaluate(run: Run) -> dict[str, float]:
    """``eval/reward`` (mean over samples), ``eval/accuracy`` (fraction with reward >= 1) and lengths, over all files."""
    generate, score = run.evaluation()
    count = run.config.evaluation.n_samples
    key = run.config.reward.reward_key
    groups: list[Group] = []
    source = run.prompt_source(run.config.evaluation.prompt_data, "--eval-prompt-data")
    for number, row in enumerate(source):
        prompt = Prompt(row.prompt, tuple(run.render(row.prompt)), row.label, dict(row.metadata), number)
        samples = prompt.samples(count)
        for i, sample in enumerate(samples):
            sample.index = FIRST_INDEX + number * count + i
        groups.append(samples)

    async def one(group: Group) -> Group:
        made = [s for siblings in await asyncio.gather(*(generate(s) for s in group)) for s in siblings]
        await score(made)
        return made

    run.progress.phase("evaluation", total=len(groups) * count)
    done = await asyncio.gather(*(one(g) for g in groups))
    samples = [s for group in done for s in group]
    rewards = [s.reward_value(key) for s in samples]
    return {
        "eval/reward": statistics.fmean(rewards),
        "eval/accuracy": sum(r >= 1.0 for r in rewards) / len(rewards),
        "eval/length_mean": statistics.fmean(s.response_length for s in samples),
    }
