"""Lets a running server generate and score the tokens of its budget."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from miles_core.contracts.engine import Sampling
from miles_core.data.sample import Sample
from miles_core.errors import MilesError
from miles_core.mismatch.budget import Cause
from miles_core.mismatch.probe import probe_prompts
from miles_core.mismatch.probe_text import probe_text
from miles_core.plugin.model_config import model_config
from miles_tools.verify.reference import Reference
from miles_tools.verify.server import Row, Server, ServerError

#: Number of long sequences that are continued, and of random tokens that make prompts new to the server.
_LONG, _NONCE = 1, 4
#: Causes of errors of generated tokens, in the order of the groups.
DECODING = "decoding"
PREFIX = "cached prefixes"
BATCH = "other rows of the batch"


@dataclass
class Measured:
    """What a server returned.

    Attributes:
        vocabulary: number of tokens of the checkpoint.
        groups: generated samples with ``rollout_log_probs``: one after another, again, and in one request (empty if refused).
        texts: samples of given tokens.
        scored: the server's log-probs of ``texts`` and then of all generated samples at temperature 1; None if it cannot score.
        missing: causes that cannot be measured.
    """

    vocabulary: int
    groups: list[list[Sample]]
    texts: list[Sample]
    scored: list[np.ndarray] | None
    missing: list[Cause] = field(default_factory=list)

    @property
    def generated(self) -> list[Sample]:
        """The generated samples of all groups."""
        return [sample for group in self.groups for sample in group]


def measure_server(server: Server, reference: Reference, sampling: Sampling) -> Measured:
    """Let the server generate and score."""
    run = reference.run
    config = model_config(reference.config.model.hf_checkpoint) or {}
    vocabulary = int(run.plan.fact("model.vocab_size") or len(run.tokenizer))
    context = int(reference.config.rollout.max_context_len or run.plan.fact("model.context") or 2048)
    prompts = [list(p.tokens) for p in probe_prompts(run) if p.tokens]
    text = probe_text(config, prompts, vocabulary, context, True)
    draw = np.random.default_rng(
        secrets.randbits(32)
    )  # other verifications must not have left the prompts in the cache
    most = context - sampling.max_new_tokens - _NONCE
    starts = [
        p[:1] + draw.integers(0, vocabulary, _NONCE).tolist() + p[1:most] for p in [*text.sequences[:_LONG], *prompts]
    ]
    groups, missing = [], []
    for _ in (DECODING, PREFIX):
        rows = [server.generate([start], sampling)[0] for start in starts]
        groups.append(_samples(starts, rows))
    try:
        groups.append(_samples(starts, server.generate(starts, sampling)))
    except ServerError as error:
        missing.append(Cause(BATCH, why=f"the server takes one prompt per request: {error}"))
    for sample in (s for group in groups for s in group):
        if any(not 0 <= token < vocabulary for token in sample.tokens):
            raise MilesError(
                f"--url: the server generated token {max(sample.tokens)}, and the checkpoint {reference.config.model.hf_checkpoint} has "
                f"{vocabulary} tokens: they have different vocabularies; give the checkpoint that the server loaded"
            )
    texts = [_sample(row[:1], row[1:], None, i) for i, row in enumerate(text.sequences)]
    scored = None
    try:
        rows_to_score = [*texts, *(sample for group in groups for sample in group)]
        scored = [server.score(s.tokens)[-s.response_length :] for s in rows_to_score]
    except ServerError as error:
        missing.append(Cause("scores of given tokens, so decoding is not told apart from the model", why=str(error)))
    return Measured(vocabulary, groups, texts, scored, missing)


def _samples(prompts: Sequence[Sequence[int]], rows: Sequence[Row]) -> list[Sample]:
    pairs = zip(prompts, rows, strict=True)
    return [_sample(prompt, row.tokens, row.log_probs, index) for index, (prompt, row) in enumerate(pairs)]


def _sample(prompt: Sequence[int], response: Sequence[int], log_probs: np.ndarray | None, index: int) -> Sample:
    sample = Sample(tokens=[*prompt, *response], response_length=len(response), index=index, group_index=index)
    sample.rollout_log_probs = None if log_probs is None else log_probs.tolist()
    return sample
