"""Checks after the first weight sync that every engine and the trainer compute the same function.

A wrong engine does not raise an error: it samples from another distribution than the trained one, and rewards change as in a correct
run. Therefore both sides score the same text (``probe_text``) before training. A difference that the declared precisions do not explain
(``allowance``) stops the run, or is a warning with ``--allow-mismatch``. The comparison is repeated when a side changes its number
format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.data.sample import Sample
from miles_core.errors import MilesError, MismatchError
from miles_core.plugin.detect import config_facts
from miles_core.plugin.model_config import model_config
from miles_core.precision.schedule import PLAIN
from miles_core.sync.push import make_codec
from miles_mismatch.agreement import Agreement, compare
from miles_mismatch.allowance import Side, allowance
from miles_mismatch.probe import bare, probe, probe_prompts
from miles_mismatch.probe_text import ProbeText, probe_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import PolicyParts

log = logging.getLogger(__name__)

#: Number of tokens to generate per prompt if an engine cannot score.
_GENERATED = 32
#: First key of generated probes, outside the range of the run's samples.
_FIRST_KEY = 1 << 41
_ADVICE = (
    "Check that the engine loads this checkpoint's architecture (its log names weights that it did not load), what its options change "
    "(rotary embedding, window, attention backend, logit scale, number format), and plugins that change one side's model. "
    "miles verify --budget divides the difference by cause; --allow-mismatch trains anyway"
)


def make_check(run: Run) -> Callable[[PolicyParts], Awaitable[Mapping[str, float]]] | None:
    """Create the check named ``first_sync``; None with ``--no-self-check``."""
    return FirstSync(run) if run.config.model.self_check else None


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
        if parts.engine is None or key in self._done:
            return {}
        engine, trainer = precisions(self._run, parts)
        try:  # imitating the engine's precision reduces the differences due to rounding
            found = await self._compare(parts, imitate_engine(engine, trainer))
            trainer = replace(engine, dtype=trainer.dtype)
        except MilesError:
            found = await self._compare(parts, AS_TRAINED)
        for worker, agreement in found.items():
            self._judge(parts, worker, agreement, (engine, trainer))
        self._done.add(key)
        return {}

    async def _compare(self, parts: PolicyParts, emulation: Emulation) -> Mapping[str, Agreement]:
        """Return engine worker ("" if there is only one) -> agreement with the trainer, which computes with ``emulation``."""
        run, engine = self._run, parts.serving
        prompts, text = self._text(parts)
        temperature = run.config.rollout.temperature
        needed = {"score"} if temperature == 1 else {"score", "score_temperature"}
        if not needed <= engine.capabilities:
            return {"": await self._compare_generated(parts, prompts, text, emulation)}
        samples = [
            Sample(tokens=list(tokens), response_length=len(tokens) - 1, index=i, group_index=i)
            for i, tokens in enumerate(text.sequences)
        ]
        trainer = await parts.learner.log_probs(samples, emulation)
        scores = await engine.score_each(text.sequences, temperature)
        if text.beyond:
            reached = max(map(len, text.sequences))
            names = ", ".join(f"{name} = {length}" for name, length in text.beyond.items())
            log.info("the probe of %d tokens does not reach %s of config.json", reached, names)
        return {worker: compare(found, trainer) for worker, found in scores.items()}

    async def _compare_generated(
        self, parts: PolicyParts, prompts: Sequence[Sequence[int]], text: ProbeText, emulation: Emulation
    ) -> Agreement:
        """Compare both sides on tokens that the engine samples after the prompts and after the long probe."""
        run = self._run
        context = _context(run)
        long = [tokens[: context - _GENERATED] for tokens in text.sequences]
        starts = [tokens for tokens in (*long, *prompts) if tokens]
        samples = await probe(run, parts, starts, _GENERATED, key=_FIRST_KEY)
        engine = [np.asarray(sample.rollout_log_probs, np.float64) for sample in samples]
        supports = [name for name in ("sampling_support",) if any(name in sample.fields for sample in samples)]
        trainer = await parts.learner.log_probs([bare(sample, supports) for sample in samples], emulation)
        log.info(
            "the engine %s cannot score a given text at temperature %g: compared with the trainer on %d tokens that it generated",
            run.config.run.engine,
            run.config.rollout.temperature,
            sum(map(len, engine)),
        )
        return compare(engine, trainer)

    def _text(self, parts: PolicyParts) -> tuple[list[list[int]], ProbeText]:
        run = self._run
        prompts = probe_prompts(run)
        config = model_config(parts.policy.hf_checkpoint or run.config.model.hf_checkpoint) or {}
        facts = {fact.name: fact.value for fact in config_facts(config)}
        vocabulary = facts["model.vocab_size"] or len(run.tokenizer)
        on_cpu = run.config.model.device == "cpu" or run.plan.fact("gpu.count") == 0
        return prompts, probe_text(config, prompts, vocabulary, _context(run), on_cpu)

    def _judge(self, parts: PolicyParts, worker: str, found: Agreement, declared: tuple[Side, Side]) -> None:
        """Log that two sides agree, or raise or warn if they do not. ``declared``: precisions of engine and trainer."""
        run = self._run
        engine = f"engine {run.config.run.engine}" + (f" ({worker})" if worker else "")
        sides = f"{engine} and trainer {run.config.run.trainer}"
        if len(run.policies) > 1:
            sides += f" of policy {parts.policy.name}"
        if not found.tokens:
            log.warning("%s were not compared: the probe has no tokens", sides)
            return
        exceeded = allowance(*declared).find_exceeded(found)
        if not exceeded:
            log.info("%s agree: median |delta log p| %.2g over %d tokens", sides, found.median, found.tokens)
            return
        message = (
            f"{sides} compute different functions. Over {found.tokens} tokens scored with the same weights (version "
            f"{parts.policy.version}): {'; '.join(exceeded)}. The precisions (engine {declared[0]}; trainer {declared[1]}) do not "
            f"explain that. {_ADVICE}"
        )
        if not run.config.run.allow_mismatch:
            raise MismatchError(message)
        log.warning("%s (--allow-mismatch was given)", message)


def imitate_engine(engine: Side, trainer: Side) -> Emulation:
    """Return the emulation with which the trainer computes in the engine's precision.

    Raises:
        MilesError: the trainer computes in a format that the engine does not use, so no emulation exists.
    """
    if trainer.format not in (PLAIN, engine.format):
        raise MilesError(f"the trainer computes in {trainer.format} and the engine in {engine.format}")
    differs = engine.format != trainer.format
    return Emulation(encoded=differs, activations=differs and engine.rounds_inputs, kv_dtype=engine.cache)


def precisions(run: Run, parts: PolicyParts) -> tuple[Side, Side]:
    """Return the declared precisions of a policy's engine and trainer."""
    dtype = _dtype(run)
    now = parts.precisions
    return (
        _side(run, parts, dtype, now.rollout, parts.serving.kv_cache_dtype),
        _side(run, parts, dtype, now.train, ""),
    )


def _side(run: Run, parts: PolicyParts, dtype: str, precision: str, cache: str) -> Side:
    if precision == PLAIN:
        return Side(dtype, cache=cache)
    format = make_codec(run, parts.policy, precision).format
    assert format is not None  # the name of a format
    return Side(dtype, format.name, format.error, format.quantizes_activations, cache)


def _dtype(run: Run) -> str:
    """Return the dtype in which both sides hold the model; the lower precision if this process cannot determine it."""
    model = run.config.model
    if model.dtype != "auto":
        return model.dtype
    here = run.config.run.runtime == "inline" and run.plan.fact("gpu.count") == 0
    return "float32" if model.device == "cpu" or here else "bfloat16"


def _context(run: Run) -> int:
    """Return the maximum sequence length of both sides."""
    return int(run.config.rollout.max_context_len or run.plan.fact("model.context") or 2048)
