"""Supervised warm start: a few steps of likelihood training with the policy's own trainer, before the first rollout."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from miles_core.data.prompts import read_rows
from miles_core.data.sample import Sample
from miles_core.errors import DataError

if TYPE_CHECKING:
    from miles_core.run import Run


async def warm_start(run: Run) -> None:
    """``--sft-steps`` steps on ``--sft-data``; nothing to do without it."""
    options = run.config.sft
    if not options.data or not options.steps:
        return
    samples = supervised_samples(run)
    order = random.Random(run.config.train.seed)
    queue: list[Sample] = []
    run.progress.phase("warm start", total=options.steps)
    with run.clock.phase("warm_start"):
        for number in range(options.steps):
            while len(queue) < options.batch_size:
                queue += order.sample(samples, len(samples))
            batch, queue = queue[: options.batch_size], queue[options.batch_size :]
            for policy in run.policies:
                metrics = await policy.learner.supervise(batch, lr=options.lr)
            run.progress.advance(1)
            if run.stop_requested:
                return
        for policy in run.policies:
            await policy.learner.reset_optimizer()
    run.record(0, run.clock.metrics() | metrics)


def supervised_samples(run: Run) -> list[Sample]:
    """Prompt and response tokenised apart, an end token appended: what the engine would have produced."""
    options, data = run.config.sft, run.config.data
    samples = []
    for number, row in enumerate(read_rows(options.data)):
        if options.response_key not in row:
            raise DataError(f"{options.data} row {number}: no {options.response_key!r}; it has {', '.join(row)} (--sft-response-key)")
        prompt = run.render(row[data.input_key])
        answer = run.tokenizer.encode(row[options.response_key], add_special_tokens=False) + [run.tokenizer.eos_token_id]
        samples.append(
            Sample(prompt=row[data.input_key], tokens=prompt + answer, response_length=len(answer), index=number)
        )
    if not samples:
        raise DataError(f"--sft-data {options.data}: the file is empty")
    return samples
