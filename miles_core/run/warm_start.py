"""Supervised warm start: a few steps of likelihood training with the policy's own trainer, before the first rollout."""

from __future__ import annotations

import random

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.data.column import TOKENS, as_column
from miles_core.data.prompts import Prompts
from miles_core.data.sample import Sample
from miles_core.errors import DataError
from miles_core.rollout.collect import Interrupted
from miles_core.rollout.queue import NO_LIMITS, Limits, encode_prompt
from miles_core.run.log import RunLog


async def warm_start(run: Run, parts: list[PolicyParts], log: RunLog, samples: list[Sample]) -> None:
    """Train ``--sft-steps`` supervised steps on ``samples`` (``--sft-data``); do nothing if there are none.

    Raises:
        Interrupted: the user requested a stop.
    """
    options = run.config.sft
    if not samples:
        return
    order = random.Random(run.config.train.seed)
    queue: list[Sample] = []
    first: dict[str, float] = {}
    metrics: dict[str, float] = {}
    parts = [each for each in parts if each.policy.role == "train"]
    log.progress.phase("warm start", total=options.steps)
    with run.clock.phase("warm_start"):
        for _ in range(options.steps):
            while len(queue) < options.batch_size:
                queue += order.sample(samples, len(samples))
            batch, queue = queue[: options.batch_size], queue[options.batch_size :]
            for each in parts:
                found = await each.learner.supervise(batch, lr=options.lr)
                first = run.prefix_metrics(each.policy, {"sft/loss_first": found["sft/loss"]}) | first
                metrics |= run.prefix_metrics(each.policy, found)
            log.progress.advance(1)
            if run.stop_requested:
                raise Interrupted
        for each in parts:
            await each.learner.reset_optimizer()
    log.record(0, run.clock.metrics() | metrics | first)


def supervised_samples(run: Run, rows: Prompts, limits: Limits = NO_LIMITS) -> list[Sample]:
    """Convert prompt/response pairs to samples as an engine would produce them: prompt and response are tokenised separately and
    the response ends with the end-of-sequence token.

    Raises:
        DataError: a pair cannot be tokenised or is too long for the model. Names the row.
    """
    samples, chosen, end = [], list(rows), run.tokenizer.eos_token_id
    if odd := next((row for row in chosen if isinstance(row.label, list | dict)), None):
        raise DataError(f"{odd.place}: the response is {odd.label!r:.80}; it must be a text (--sft-response-key)")
    labels = [str(row.label) for row in chosen]
    answers = run.tokenizer(labels, add_special_tokens=False, return_attention_mask=False).input_ids
    texts = run.render.encode_texts([row.prompt for row in chosen])
    for number, (row, text, answer) in enumerate(zip(chosen, texts, answers, strict=True)):
        prompt = encode_prompt(run.render, row, limits, text)
        answer.append(end)
        if limits.context is not None and len(prompt) + len(answer) > limits.context:
            raise DataError(
                f"{row.place}: prompt and response have {len(prompt) + len(answer)} tokens, and {limits.context} fit "
                f"({limits.origin}); shorten or remove the pair"
            )
        tokens = as_column(prompt + answer, TOKENS)
        samples.append(
            Sample(prompt=row.prompt, tokens=tokens, response_length=len(answer), index=number, media=row.media)
        )
    return samples
