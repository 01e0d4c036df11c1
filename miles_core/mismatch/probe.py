"""Probe samples: a few short responses, generated to be scored on both sides.

The engine generates them with its current weights in the same way as training samples (``on_request`` runs, declared fields are
recorded), but ``on_sample`` does not run and they are never trained on. They have separate random keys, so that probing does not
change training samples.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from miles_core.contracts.engine import Request, Sampling
from miles_core.data.field import SAMPLING_SUPPORT
from miles_core.data.media import Media
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError
from miles_core.rollout.queue import open_prompts
from miles_core.rollout.requests import FIRST_PROBE
from miles_core.rollout.sampling import training_sampling
from miles_core.rollout.transcript import Transcript

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import PolicyParts

PROMPTS = 8
RESPONSE_TOKENS = 32
#: Prompts for runs without prompt data. Any text is suitable, because both sides only have to agree on its scores.
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


class ProbePrompt(NamedTuple):
    """Token ids of a prompt, and the media of its placeholders."""

    tokens: Sequence[int]
    media: tuple[Media, ...] = ()


def probe_prompts(run: Run) -> list[ProbePrompt]:
    """Return the first ``PROMPTS`` prompts of the run's data, or ``PLAIN_PROMPTS`` if it has none."""
    if not run.config.data.prompt_data or run.config.data.prompts != "file":
        return [ProbePrompt(run.tokenizer(text)["input_ids"]) for text in PLAIN_PROMPTS[:PROMPTS]]
    rows = open_prompts(run.config, run.config.data.prompt_data, "--prompt-data").next(PROMPTS)
    longest = run.config.rollout.max_context_len or run.plan.fact("model.context")
    made = [ProbePrompt(run.render(row.prompt, media=row.media), row.media) for row in rows]
    fitting = [p for p in made if longest is None or len(p.tokens) < longest]
    if not fitting:
        raise ConfigError(f"none of the first {PROMPTS} prompts leaves room in the context of {longest} tokens")
    return fitting


async def probe(
    run: Run,
    parts: PolicyParts,
    prompts: Sequence[ProbePrompt],
    key: int = 0,
    support: bool = False,
) -> list[Sample]:
    """Generate one response per prompt with the rollout's sampling parameters.

    Args:
        parts: parts of the policy, which must have an engine.
        prompts: the prompts.
        key: index of the first probe, which determines its random numbers; the others have consecutive indexes.
        support: record the sampling support even if training uses the full vocabulary.
    """
    sampling = training_sampling(run.config)
    sampling = dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, RESPONSE_TOKENS), stop=())
    wanted = sampling.truncated and (support or not run.config.rollout.full_vocab_logprobs)
    extras = {SAMPLING_SUPPORT.name} if wanted and "sampling_support" in parts.serving.capabilities else set()
    calls = [generate_probe(run, parts, prompt, sampling, key + i, i, extras) for i, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*calls))


async def generate_probe(
    run: Run,
    parts: PolicyParts,
    prompt: ProbePrompt,
    sampling: Sampling,
    key: int,
    group: int,
    extras: Collection[str] = (),
) -> Sample:
    """Generate one probe.

    Args:
        run, parts: of a policy with an engine.
        prompt: the prompt.
        sampling: sampling parameters.
        key: index of the probe, which determines its random numbers.
        group: group index; probes of one group share a prompt. Also the index of its sample.
        extras: names of fields to record.
    """
    policy, (tokens, media) = parts.policy, prompt
    request = Request(
        list(tokens), sampling, key=FIRST_PROBE + key, group=group, extras=set(extras), policy=policy.name, media=media
    )
    run.hooks.on("on_request", run=run, policy=policy, request=request)
    response = await parts.serving.generate(request)
    sample = Sample(tokens=list(tokens) + response.tokens, response=response.text, index=group, group_index=group)
    sample.media = media
    sample.response_length = len(response.tokens)
    transcript = Transcript(group, run.decode)
    transcript.add(None, tokens, response, "")
    transcript.fill(sample, run.fields)
    sample.validate(run.fields)
    return sample


def bare(sample: Sample, fields: Sequence[str] = ()) -> Sample:
    """Copy ``sample`` without the engine's recorded fields, except ``fields``, so that a trainer computes all choices itself."""
    recorded = {name: value for name, value in sample.fields.items() if name in fields}
    return dataclasses.replace(sample, fields=recorded, rollout_log_probs=None)
