"""Checks after the first weight sync that every engine and the trainer compute the same function.

A wrong engine does not raise an error: it samples from another distribution than the trained one, and rewards change as in a correct
run. Therefore both sides score the same text (``probe_text``) before training, and the engine generates tokens (``generated``), whose
log-probabilities and draws are checked. The trainer scores everything a second time in a wider type (``scorer``): an engine whose errors
are larger than the trainer's own rounding errors (``agreement``) is wrong, whatever their size. It stops the run, or is a warning with
``--allow-mismatch``. The comparison is repeated when a side changes its number format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from miles_core.data.field import SAMPLING_SUPPORT
from miles_core.data.sample import Sample
from miles_core.errors import MismatchError
from miles_core.mismatch.agreement import Errors, compare
from miles_core.mismatch.generated import Generated, generate, judge_draws, judge_greedy
from miles_core.mismatch.movement import can_score, score_each
from miles_core.mismatch.probe import ProbePrompt, bare, probe_prompts
from miles_core.mismatch.probe_text import ProbeText, probe_text
from miles_core.mismatch.scorer import Scorer
from miles_core.plugin.detect import config_facts
from miles_core.plugin.model_config import model_config

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import PolicyParts

log = logging.getLogger(__name__)

#: Number of sequences of the text, the longest first, whose beginnings the engine continues.
_LONG_STARTS = 3
_ADVICE = (
    "Check that the engine loads this checkpoint's architecture (its log names weights that it did not load), what its options change "
    "(rotary embedding, window, attention backend, logit scale, number format), and plugins that change one side's model. "
    "miles verify --budget divides the difference by cause; --allow-mismatch trains anyway"
)


def make_check(run: Run) -> Callable[[PolicyParts], Awaitable[Mapping[str, float]]] | None:
    """Create the check named ``first_sync``; None with ``--no-self-check``."""
    return FirstSync(run) if run.config.model.self_check else None


@dataclass(frozen=True)
class Finding:
    """The comparison of one engine worker with the trainer.

    Attributes:
        worker: name of the worker, "" if there is only one or it is not known.
        what: how the engine computed the tokens.
        errors: the errors of both sides.
        phrases: descriptions of unexplained differences; [] if there are none.
    """

    worker: str
    what: str
    errors: Errors
    phrases: list[str]


class FirstSync:
    """Compares the engines of each policy with its trainer, once for each pair of precisions."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._done: set[tuple[str, object]] = set()

    async def __call__(self, parts: PolicyParts) -> dict[str, float]:
        """Compare the sides of a policy, unless they were already compared in the current precisions.

        Raises:
            MismatchError: an engine computes another function than the trainer.
        """
        key = (parts.policy.name, parts.precisions)
        if key in self._done:
            return {}
        scorer = await Scorer.make(self._run, parts)
        found = await self._examine(parts, scorer, 0)
        if any(finding.phrases for finding in found):
            # chance and single tokens with another route do not repeat on other text
            again = await self._examine(parts, scorer, 1)
            found = again
        for finding in found:
            self._judge(parts, scorer, finding)
        self._done.add(key)
        return {}

    async def _examine(self, parts: PolicyParts, scorer: Scorer, attempt: int) -> list[Finding]:
        """Compare both sides on a text, and on tokens that the engine generates."""
        prompts, text = self._text(parts, attempt)
        scored = await self._examine_scores(parts, scorer, text)
        starts = [*map(ProbePrompt, text.sequences[:_LONG_STARTS]), *prompts]
        generated = await generate(self._run, parts, starts, _context(self._run), attempt)
        return [*scored, await self._examine_generated(scorer, generated)]

    async def _examine_scores(self, parts: PolicyParts, scorer: Scorer, text: ProbeText) -> list[Finding]:
        """Compare every worker of an engine that can score on one text; [] if it cannot."""
        temperature = self._run.config.rollout.temperature
        if not can_score(self._run, parts):
            log.info(
                "the engine %s cannot score a given text at temperature %g: only tokens that it generates are checked",
                self._run.config.run.engine,
                temperature,
            )
            return []
        if text.beyond:
            reached = max(map(len, text.sequences))
            names = ", ".join(f"{name} = {length}" for name, length in text.beyond.items())
            log.info("the probe of %d tokens does not reach %s of config.json", reached, names)
        samples = [
            Sample(tokens=list(tokens), response_length=len(tokens) - 1, index=i, group_index=i)
            for i, tokens in enumerate(text.sequences)
        ]
        own, reference = await scorer.score(samples), await scorer.refer(samples)
        errors = {
            worker: compare(found, own, reference.scores, scorer.scale, scorer.floor)
            for worker, found in (await score_each(self._run, parts, samples)).items()
        }
        return [Finding(worker, "scored", each, each.find_excess()) for worker, each in errors.items()]

    async def _examine_generated(self, scorer: Scorer, generated: Generated) -> Finding:
        """Check the log-probabilities that the engine reports for its tokens, and that they are draws of the reference."""
        sampled = [bare(sample, [SAMPLING_SUPPORT.name]) for sample in generated.sampled]
        own, reference = await scorer.score(sampled), await scorer.refer(sampled)
        errors = compare(_reported(generated.sampled), own, reference.scores, scorer.scale, scorer.floor)
        phrases = errors.find_excess()
        if generated.drawn and reference.entropies is not None:
            phrases += judge_draws(reference.scores or own, reference.entropies)
        greedy = [bare(sample) for sample in generated.greedy]
        best = await scorer.refer(greedy)
        if best.gaps is not None:
            phrases += judge_greedy(best.gaps, np.concatenate(errors.own), scorer.floor)
        if self._run.config.rollout.temperature == 1:  # greedy tokens are reported at this temperature
            rows = compare(
                _reported(generated.greedy), await scorer.score(greedy), best.scores, scorer.scale, scorer.floor
            )
            phrases += rows.find_excess()
        return Finding("", "generated", errors, phrases)

    def _text(self, parts: PolicyParts, attempt: int) -> tuple[list[ProbePrompt], ProbeText]:
        run = self._run
        prompts = probe_prompts(run)
        config = model_config(parts.policy.hf_checkpoint or run.config.model.hf_checkpoint) or {}
        facts = {fact.name: fact.value for fact in config_facts(config)}
        vocabulary = facts["model.vocab_size"] or len(run.tokenizer)
        on_cpu = run.config.model.device == "cpu" or run.plan.fact("gpu.count") == 0
        groups = -(-(facts["model.num_experts"] or 0) // (facts["model.top_k"] or 1))
        tokens = [prompt.tokens for prompt in prompts]
        return prompts, probe_text(config, tokens, vocabulary, _context(run), on_cpu, groups, attempt)

    def _judge(self, parts: PolicyParts, scorer: Scorer, found: Finding) -> None:
        """Log that two sides agree, or raise or warn if they do not."""
        run, errors = self._run, found.errors
        engine = f"engine {run.config.run.engine}" + (f" ({found.worker})" if found.worker else "")
        sides = f"{engine} and trainer {run.config.run.trainer}"
        if len(run.policies) > 1:
            sides += f" of policy {parts.policy.name}"
        if not errors.tokens:
            log.warning("%s were not compared: no tokens were %s", sides, found.what)
            return
        if not found.phrases:
            log.info("%s agree: errors of %s over %d tokens %s", sides, errors, errors.tokens, found.what)
            return
        message = (
            f"{sides} compute different functions. Over {errors.tokens} tokens {found.what} with the same weights (version "
            f"{parts.policy.version}): {'; '.join(found.phrases)}. {scorer.describe()}. {_ADVICE}"
        )
        if not run.config.run.allow_mismatch:
            raise MismatchError(message)
        log.warning("%s (--allow-mismatch was given)", message)


def _reported(samples: Sequence[Sample]) -> list[np.ndarray]:
    return [np.asarray(sample.rollout_log_probs, np.float64) for sample in samples]


def _context(run: Run) -> int:
    """Return the maximum sequence length of both sides."""
    return int(run.config.rollout.max_context_len or run.plan.fact("model.context") or 2048)
