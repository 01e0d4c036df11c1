"""Generates tokens with the engine to check them after the first sync, through every path of its decoder and with the run's options.

An engine may score given text correctly but generate tokens incorrectly: decoding uses other kernels and position counters, and the sampler
changes logits. The probes follow short and long prompts, one after another and several at once; two of each
prompt share its prefix, some continue earlier ones, whose tokens the engine may have cached. They are sampled with the run's temperature,
top-p and top-k, and greedily.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from miles_core.contracts.engine import Sampling
from miles_core.data.field import SAMPLING_SUPPORT
from miles_core.data.sample import Sample
from miles_core.mismatch.agreement import find_larger
from miles_core.mismatch.probe import ProbePrompt, generate_probe
from miles_core.mismatch.tolerance import FLOOR
from miles_core.rollout.sampling import training_sampling

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import PolicyParts

#: Number of tokens of a sampled probe, of a greedy one, and of one that continues another.
LONGEST, GREEDY, SHORT = 32, 16, 8
#: Number of probes of each prompt, and number of prompts with further probes of a single token, and of probes that are continued.
_ROWS, _SINGLE, _CONTINUED = 2, 2, 4
#: First index of these probes, and distance between the indexes of two attempts; other probes have smaller ones.
_FIRST_KEY, _KEYS = 1 << 40, 1 << 20
#: Standard errors of the mean that count as chance for sampled tokens.
_CHANCE = 4.5


@dataclass(frozen=True)
class Generated:
    """What the engine generated.

    Attributes:
        sampled: probes with the run's sampling options.
        greedy: greedy probes.
        drawn: whether the distribution of the tokens in ``sampled`` is known: without top-p and top-k, or if the engine recorded the
        support.
    """

    sampled: list[Sample]
    greedy: list[Sample]
    drawn: bool


async def generate(
    run: Run, parts: PolicyParts, prompts: Sequence[ProbePrompt], context: int, attempt: int
) -> Generated:
    """Generate the probes.

    Args:
        run, parts: of a policy with an engine.
        prompts: prompts; those that leave no room in the context are shortened, and read as text.
        context: maximum sequence length.
        attempt: number of the attempt; each has its own random numbers.
    """
    usual = replace(training_sampling(run.config), stop=(), stop_token_ids=(), ignore_eos=True)
    greedy = replace(usual, temperature=0.0, top_p=1.0, top_k=-1)
    recorded = usual.truncated and SAMPLING_SUPPORT.name in parts.serving.capabilities
    keys = iter(range(_FIRST_KEY + attempt * _KEYS, _FIRST_KEY + (attempt + 1) * _KEYS))

    async def ask(calls: Sequence[tuple[ProbePrompt, Sampling, int]], tokens: int) -> list[Sample]:
        asked = [
            generate_probe(
                run,
                parts,
                start,
                replace(sampling, max_new_tokens=max(min(tokens, context - len(start.tokens)), 1)),
                next(keys),
                group,
                [SAMPLING_SUPPORT.name] if recorded and sampling is usual else [],
            )
            for start, sampling, group in calls
        ]
        return list(await asyncio.gather(*asked))

    most = max(context - LONGEST - SHORT, 1)
    starts = [
        (p if len(p.tokens) <= most else ProbePrompt(p.tokens[:most]), group)
        for group, p in enumerate(prompts)
        if p.tokens
    ]
    sampled = await ask([(start, usual, group) for start, group in starts[-1:]], SHORT)  # a single row
    together = await asyncio.gather(
        ask([(start, usual, group) for start, group in starts for _ in range(_ROWS)], LONGEST),
        ask([(start, usual, group) for start, group in starts[-_SINGLE:]], 1),
        ask([(start, greedy, group) for start, group in starts], GREEDY),
    )
    sampled += together[0] + together[1]
    longer = [s for s in together[0][::_ROWS] if len(s.tokens) < context][:_CONTINUED]
    continued = [ProbePrompt(s.tokens, s.media) for s in longer]
    sampled += await ask([(p, usual, len(prompts) + i) for i, p in enumerate(continued)], SHORT)
    for index, sample in enumerate((*sampled, *together[2])):
        sample.index = index
    return Generated(sampled, together[2], recorded or not usual.truncated)


def judge_draws(log_probs: Sequence[np.ndarray], entropies: Sequence[np.ndarray]) -> list[str]:
    """Return a description if tokens are not plausible draws from the distributions: the mean of their log-probabilities plus the entropies
    is 0 if
    they were drawn from them, and its standard error follows from the spread.

    Args:
        log_probs: of the tokens under the reference, one array [tokens] per sample.
        entropies: of the distributions, in the same shape.
    """
    surplus = np.concatenate([np.zeros(0), *(p + h for p, h in zip(log_probs, entropies, strict=True))])
    if len(surplus) < 2:
        return []
    mean, error = float(surplus.mean()), float(surplus.std(ddof=1)) / math.sqrt(len(surplus))
    if not abs(mean) > _CHANCE * error:
        return []
    likely = "likely" if mean > 0 else "unlikely"
    return [
        f"the {len(surplus)} tokens that it sampled are too {likely}: {abs(mean):.2g} nats per token more than tokens drawn from this "
        f"distribution are ({abs(mean) / max(error, 1e-9):.0f} standard errors)"
    ]


def judge_greedy(gaps: Sequence[np.ndarray], own: np.ndarray, floor: float = FLOOR) -> list[str]:
    """Return a description if greedy tokens are not the most likely ones.

    Args:
        gaps: log-probability of the most likely token minus that of the chosen one under the reference, one array per sample.
        own: rounding errors of the trainer, [tokens]. Such errors of two tokens explain a gap of twice their size.
        floor: size of errors that are never judged.
    """
    larger = find_larger(np.concatenate([np.zeros(0), *gaps]) / 2, own, _CHANCE, floor)
    return (
        [f"its greedy tokens are not the most likely ones: with half the difference as the error, {larger}"]
        if larger
        else []
    )
