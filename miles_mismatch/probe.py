"""Probe samples: a few short responses, generated to be scored on both sides.

They come from the engine under the weights it serves now, by the path that training samples take (plugins see the
requests, declared fields are recorded), but are shown to nobody else and trained on by nobody. Their random numbers
depend on their own keys, so that taking them changes no training sample.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from miles_core.contracts.engine import Request
from miles_core.data.field import SAMPLING_SUPPORT
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError
from miles_core.rollout.keys import FIRST_PROBE
from miles_core.rollout.sampling import training_sampling
from miles_core.rollout.source import open_prompts
from miles_core.rollout.transcript import Transcript

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import PolicyParts

PROMPTS = 8
RESPONSE_TOKENS = 32
#: Where there are no prompts: any text will do, as both sides only have to agree about it.
PLAIN_PROMPTS = (
    "Add 17 and 25, then say how you did it:",
    "The list of the first ten prime numbers is",
    "A farmer has 12 cows and buys 5 more. How many",
    "def reverse(text: str) -> str:",
    "The capital of France is",
    "To boil an egg, first",
    "If x + 3 = 10, then x =",
    "Once upon a time there was a",
)


def probe_prompts(run: Run, count: int = PROMPTS) -> list[list[int]]:
    """Token ids of the first ``count`` prompts of the run's data; of texts of our own where it has none."""
    if not run.config.data.prompt_data or run.config.data.prompts != "file":
        return [run.tokenizer(text)["input_ids"] for text in PLAIN_PROMPTS[:count]]
    rows = open_prompts(run.config, run.config.data.prompt_data, "--prompt-data").next(count)
    longest = run.config.rollout.max_context_len or run.plan.fact("model.context")
    made = [list(run.render(row.prompt)) for row in rows]
    fitting = [p for p in made if longest is None or len(p) < longest]
    if not fitting:
        raise ConfigError(f"none of the first {count} prompts leaves room in the context of {longest} tokens")
    return fitting


async def probe(
    run: Run,
    parts: PolicyParts,
    prompts: Sequence[Sequence[int]],
    response_tokens: int = RESPONSE_TOKENS,
    key: int = 0,
    support: bool = False,
) -> list[Sample]:
    """One response to each prompt, at the rollout's sampling parameters.

    Args:
        parts: of the policy, which has an engine.
        prompts: token ids.
        response_tokens: at most so many.
        key: number of the first one among probes, which its random numbers depend on; the others follow.
        support: have the sampling support recorded even where training uses the whole vocabulary.
    """
    sampling = training_sampling(run.config)
    sampling = dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, response_tokens), stop=())
    wanted = sampling.truncated and (support or not run.config.rollout.full_vocab_logprobs)
    engine, policy = parts.serving, parts.policy
    extras = {SAMPLING_SUPPORT.name} if wanted and "sampling_support" in engine.capabilities else set()

    async def one(i: int, tokens: Sequence[int]) -> Sample:
        number = FIRST_PROBE + key + i
        request = Request(list(tokens), sampling, key=number, group=i, extras=set(extras), policy=policy.name)
        run.hooks.on("on_request", run=run, policy=policy, request=request)
        response = await engine.generate(request)
        sample = Sample(tokens=list(tokens) + response.tokens, response=response.text, index=i, group_index=i)
        sample.response_length = len(response.tokens)
        transcript = Transcript(i, run.text)
        transcript.add(None, tokens, response, "")
        transcript.fill(sample, run.fields)
        sample.validate(run.fields)
        return sample

    return list(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))


def bare(sample: Sample, fields: Sequence[str] = ()) -> Sample:
    """``sample`` as nobody's rollout: without what the engine recorded, except the fields named. A trainer then
    computes everything by itself."""
    recorded = {name: value for name, value in sample.fields.items() if name in fields}
    return dataclasses.replace(sample, fields=recorded, rollout_log_probs=None)
