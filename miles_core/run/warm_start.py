"""Supervised warm start: a few steps of likelihood training with the policy's own trainer, before the first rollout."""

from __future__ import annotations

import random

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.data.prompts import Prompts
from miles_core.data.sample import Sample
from miles_core.rollout.collect import Interrupted
from miles_core.run.log import RunLog


async def warm_start(run: Run, parts: list[PolicyParts], log: RunLog) -> None:
    """``--sft-steps`` steps on ``--sft-data``; nothing to do without it. Raises Interrupted when the user stops it."""
    options = run.config.sft
    if not options.data or not options.steps:
        return
    samples = supervised_samples(run)
    order = random.Random(run.config.train.seed)
    queue: list[Sample] = []
    log.progress.phase("warm start", total=options.steps)
    with run.clock.phase("warm_start"):
        for _ in range(options.steps):
            while len(queue) < options.batch_size:
                queue += order.sample(samples, len(samples))
            batch, queue = queue[: options.batch_size], queue[options.batch_size :]
            for each in parts:
                metrics = await each.learner.supervise(batch, lr=options.lr)
            log.progress.advance(1)
            if run.stop_requested:
                raise Interrupted
        for each in parts:
            await each.learner.reset_optimizer()
    log.record(0, run.clock.metrics() | metrics)


def supervised_samples(run: Run) -> list[Sample]:
    """Prompt and response tokenised apart, an end token appended: what the engine would have produced."""
    options, data = run.config.sft, run.config.data
    assert options.data is not None  # the caller looked
    rows = Prompts(
        options.data, input_key=data.input_key, label_key=options.response_key, metadata_key=data.metadata_key
    )
    samples = []
    for number, row in enumerate(rows):
        prompt = run.render(row.prompt)
        answer = [*run.tokenizer.encode(str(row.label), add_special_tokens=False), run.tokenizer.eos_token_id]
        samples.append(Sample(prompt=row.prompt, tokens=prompt + answer, response_length=len(answer), index=number))
    return samples
