"""The mismatch budget of a running server and a checkpoint, without a run and without access to the server's internals.

The server generates tokens three times: prompts that it has not seen, one after another; the same prompts again, whose prefixes it may
have cached; and all of them in one request. It also scores texts. The checkpoint in a wider type is the reference. As in
``mismatch.budget``, each pass changes the reference's log-probabilities to those of a server with one more deviation; the order is:
processing of the log-probabilities, deviations that the trainer can imitate, the rest of the server's scores of given tokens, decoding,
cached prefixes, rows of the same batch. A pass is made only if errors are larger than the checkpoint's own rounding errors
(``mismatch.agreement``), so a server without a defect has one row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.config.config import Config
from miles_core.contracts.engine import Sampling
from miles_core.data.sample import Sample
from miles_core.errors import MilesError, PlanError
from miles_core.mismatch.agreement import compare
from miles_core.mismatch.budget import KERNELS, Budget, Cause, divide
from miles_core.mismatch.gap import LogProbs, measure
from miles_core.mismatch.generated import judge_draws
from miles_core.mismatch.probe import PLAIN_PROMPTS, RESPONSE_TOKENS
from miles_core.plugin.model_config import model_config
from miles_core.redact import redact
from miles_core.rollout.sampling import training_sampling
from miles_tools.verify.processing import Processing, find_neighbours, find_processings
from miles_tools.verify.reference import Deviation, Reference, find_deviations
from miles_tools.verify.server import Server
from miles_tools.verify.server_probes import BATCH, DECODING, PREFIX, Measured, measure_server
from miles_tools.verify.verify import Verification

#: A deviation is a cause if it removes at least this fraction of the squares of the remaining errors.
_LEAST = 0.3
#: Factors by which fitted values are changed, one after another, until rounding explains the errors.
_FACTORS = tuple(1 + 0.15 / 2**halving for halving in range(20))
#: Kinds of processing whose values are refined: with few repeated tokens, tried values of another kind can be closer.
_KINDS = 4
#: Most deviations of the model that are combined.
_MOST = 3
#: Errors in nats count as at most this in the choice of deviations, so that a few tokens do not decide it.
_CUT = 1.0
OTHER = "other weights, or another computation"
DRAWS = "tokens are drawn from another distribution than the reported one"
TOKENIZER = "tokenizer"
ADVICE = {
    OTHER: "check that the server loaded this checkpoint (the newest weights, every layer: its log names weights that it did not load), "
    "and options that change the model",
    DECODING: "the server scores the same tokens correctly: change its attention backend, or switch off CUDA graphs and speculative decoding",
    PREFIX: "switch off the prefix cache (SGLang --disable-radix-cache, vLLM --no-enable-prefix-caching), or flush it after each update",
    BATCH: "switch on batch-invariant kernels (SGLang --enable-deterministic-inference, VLLM_BATCH_INVARIANT=1), and report it to the "
    "server's developers if the difference is larger than rounding",
    DRAWS: "look for min-p, penalties or logit biases among the server's defaults; set them explicitly in requests",
    TOKENIZER: "send token ids, or serve the tokenizer of the checkpoint",
}


@dataclass(frozen=True)
class Finding:
    """A cause beyond rounding.

    Attributes:
        name, advice: the cause, and what to do.
        nats: mean |change of log-prob| per token; None if it does not change reported log-probs.
        share: of the gap. detail: measured numbers.
    """

    name: str
    advice: str
    nats: float | None = None
    share: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        size = "" if self.nats is None else f": {self.nats:.3g} nats per token, {self.share:.0%} of the gap"
        return f"{self.name}{size}{f' ({self.detail})' if self.detail else ''}. What to do: {self.advice}"


@dataclass(frozen=True)
class ServerBudget:
    """The result: the budget, the causes beyond rounding, and the compared samples with log-probs of server and trainer."""

    budget: Budget
    findings: list[Finding]
    samples: list[Sample]
    server: list[np.ndarray]
    trainer: list[np.ndarray]


async def verify_server(server: Server, words: Sequence[str], config: Config, directory: Path) -> Verification:
    """Compare a server with a checkpoint.

    Args:
        server: the server. words, config: options of ``miles train``, and their values.
        directory: of the result.
    """
    if config.model.dtype == "auto":  # the server computes in the checkpoint's dtype by default
        content = model_config(config.model.hf_checkpoint) or {}
        dtype = content.get("dtype") or content.get("torch_dtype") or "bfloat16"
        config = config.replace({"model.dtype": dtype}, origin="config.json")
    sampling = training_sampling(config)
    sampling = replace(
        sampling, max_new_tokens=min(sampling.max_new_tokens, RESPONSE_TOKENS), stop=(), stop_token_ids=()
    )
    reference = Reference(words, config, directory)
    try:
        found = await examine(server, reference, sampling)
    finally:
        await reference.close()
    return Verification(
        policy=f"{server.protocol} at {redact(server.url)}",
        tolerance=config.run.verify_logprobs_tolerance,
        gap=measure(found.server, found.trainer, found.samples, reference.run.decode),
        decoding=None,
        budget=found.budget,
        samples=found.samples,
        engine=found.server,
        trainer=found.trainer,
        findings=[str(finding) for finding in found.findings],
    )


async def examine(server: Server, reference: Reference, sampling: Sampling) -> ServerBudget:
    """Measure a server and divide its gap.

    Args:
        sampling: parameters of training, which the server receives.

    Raises:
        MilesError: the server does not answer as its protocol does, or has another vocabulary.
    """
    found = measure_server(server, reference, sampling)
    division = _Division(server, reference, sampling, found)
    return await division.walk()


class _Division:
    """The passes from the reference to the server's log-probabilities of generated tokens."""

    def __init__(self, server: Server, reference: Reference, sampling: Sampling, found: Measured) -> None:
        self.server, self.reference, self.sampling, self.found = server, reference, sampling, found
        self.samples = found.generated
        self.reported = [np.asarray(s.rollout_log_probs, np.float64) for s in self.samples]
        self.passes: list[tuple[str, bool, list[np.ndarray]]] = []
        self.advice: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.requested = Processing("", temperature=sampling.temperature)

    async def walk(self) -> ServerBudget:
        found, reference = self.found, self.reference
        every = [*found.texts, *self.samples]
        first = len(found.texts)
        self.wide, self.own = await reference.score(every), await reference.score(every, wider=False)
        self.columns: list[dict[str, np.ndarray]] | None = None
        start = await self.process(self.requested)
        trained = [
            w + (o - b) / self.sampling.temperature
            for w, o, b in zip(start, self.own[first:], self.wide[first:], strict=True)
        ]
        processing = self.requested
        if found.scored is None:
            processing = await self.find_processing([np.zeros(len(r)) for r in self.reported])
        self.now = await self.add_processing(processing, start)
        # the model: texts and generated tokens if the server scores, otherwise the generated tokens alone
        target = found.scored
        if target is None:
            target = [
                b + (e - n) * processing.temperature
                for b, e, n in zip(self.wide[first:], self.reported, self.now, strict=True)
            ]
        rows = every[len(every) - len(target) :]
        found_steps = await self.find_model(rows, target)
        last = found_steps[-1][1] if found_steps else self.wide[len(every) - len(target) :]
        if found.scored is not None:
            corrections = [t - b for t, b in zip(target[first:], self.wide[first:], strict=True)]
            processing = await self.find_processing(corrections)
            self.now = await self.add_processing(processing, start)
        steps: list[tuple[str, str, LogProbs]] = [(one.name, one.advice, scores) for one, scores in found_steps]
        if self.exceeds(target, last, rows):
            steps.append((OTHER, ADVICE[OTHER], target))
        self.add_model(steps, processing.temperature)
        self.add_groups(processing.temperature)
        await self.check_draws()
        self.check_tokenizer()
        budget = divide(
            self.reported, start, [*self.passes, (KERNELS, False, self.reported)], trained, self.samples, found.missing
        )
        named = [
            Finding(c.name, self.advice[c.name], c.abs_delta, c.share)
            for c in budget.ordered()
            if c.name in self.advice
        ]
        return ServerBudget(budget, [*named, *self.findings], self.samples, self.reported, trained)

    def add(self, name: str, advice: str, scores: list[np.ndarray]) -> None:
        self.passes.append((name, False, scores))
        self.advice[name] = advice
        self.now = scores

    def add_model(self, steps: Sequence[tuple[str, str, LogProbs]], temperature: float) -> None:
        """Add the passes of the model; the log-probs of each are at temperature 1, and those of the generated tokens are last."""
        before = self.wide[len(self.found.texts) :]
        for name, advice, scores in steps:
            after = scores[-len(self.samples) :]
            self.add(name, advice, self.shift(before, after, temperature))
            before = list(after)

    def shift(self, before: LogProbs, after: LogProbs, temperature: float) -> list[np.ndarray]:
        """Return the current log-probs, changed as those at temperature 1 change from ``before`` to ``after``."""
        return [n + (a - b) / temperature for n, b, a in zip(self.now, before, after, strict=True)]

    def exceeds(
        self, server: LogProbs, expected: LogProbs, rows: Sequence[Sample], temperature: float = 1.0
    ) -> list[str]:
        """Describe how the server's log-probs of ``rows`` at a temperature differ from the expected ones by more than rounding does."""
        where = {id(s): i for i, s in enumerate([*self.found.texts, *self.samples])}
        wide, own = ([side[where[id(s)]] for s in rows] for side in (self.wide, self.own))
        own = [
            w + (o - w) / temperature for w, o in zip(wide, own, strict=True)
        ]  # errors of logits are divided like the logits
        return compare([w + (s - e) for w, s, e in zip(wide, server, expected, strict=True)], own, wide).find_excess()

    async def process(self, processing: Processing) -> list[np.ndarray]:
        """Compute the log-probs that a server with the checkpoint's model and this processing reports."""
        if processing.plain:
            return self.wide[len(self.found.texts) :]
        if self.columns is None:
            names = ("top_tokens", "top_log_probs", "log_normalizer")
            self.columns = await self.reference.columns(self.samples, names, top_k=self.found.vocabulary)
        return [
            processing.apply(s, c["top_tokens"], c["top_log_probs"], c["log_normalizer"])
            for s, c in zip(self.samples, self.columns, strict=True)
        ]

    async def add_processing(self, processing: Processing, start: list[np.ndarray]) -> list[np.ndarray]:
        if processing == self.requested:
            return start
        scores = await self.process(processing)
        self.passes, self.advice = [(processing.name, False, scores)], {processing.name: processing.advice}
        return scores

    async def find_processing(self, corrections: LogProbs) -> Processing:
        """Find the processing of the reported log-probs; ``corrections``: changes at temperature 1 that the model explains."""

        async def errors_of(one: Processing) -> list[np.ndarray]:
            scores = await self.process(one)
            return [e - s - c / one.temperature for e, s, c in zip(self.reported, scores, corrections, strict=True)]

        async def exceeds(one: Processing) -> bool:
            errors = await errors_of(one)
            zeros = [np.zeros(len(e)) for e in errors]
            return bool(self.exceeds(errors, zeros, self.samples, self.sampling.temperature))

        if not await exceeds(self.requested):
            return self.requested

        async def refine(one: Processing) -> tuple[float, Processing]:
            least = _squares(await errors_of(one))
            for factor in _FACTORS if one.fitted else ():
                if not await exceeds(one):
                    break
                for other in find_neighbours(one, self.sampling, factor):
                    if (size := _squares(await errors_of(other))) < least:
                        one, least = other, size
            return least, one

        least, best = (1 - _LEAST) * _squares(await errors_of(self.requested)), self.requested
        closest: dict[tuple[bool, ...], tuple[float, Processing]] = {}
        for one in find_processings(self.sampling, _generation_defaults(self.reference)):
            size = _squares(await errors_of(one))
            if size < closest.get(one.kind, (least, one))[0]:
                closest[one.kind] = (size, one)
        for _, one in sorted(closest.values(), key=lambda pair: pair[0])[:_KINDS]:
            size, one = await refine(one)
            if size < least:
                least, best = size, one
            if not await exceeds(best):
                break
        return best

    async def find_model(self, rows: Sequence[Sample], target: LogProbs) -> list[tuple[Deviation, list[np.ndarray]]]:
        """Find the deviations of the model that explain the server's log-probs; with the log-probs after each of them."""
        assumed: list[Deviation] = []
        found: list[tuple[Deviation, list[np.ndarray]]] = []
        now = self.wide[len(self.wide) - len(target) :]
        tokenizer = self.reference.run.tokenizer
        untried: dict[str, Cause] = {}  # matters only if errors remain
        while len(assumed) < _MOST and self.exceeds(target, now, rows):
            best, least = None, (1 - _LEAST) * _squares([t - n for t, n in zip(target, now, strict=True)])
            for one in find_deviations(self.reference.config, self.server.added, tokenizer.bos_token_id):
                if one.name in untried or any(_clash(one, other) for other in assumed):
                    continue
                try:
                    scores = await self.reference.score(rows, [*assumed, one])
                except MilesError as error:
                    untried[one.name] = Cause(one.name, why=f"the trainer cannot imitate it: {_shorten(error)}")
                    continue
                if (size := _squares([t - s for t, s in zip(target, scores, strict=True)])) < least:
                    best, least = (one, scores), size
            if best is None:
                self.found.missing.extend(untried.values())
                break
            assumed.append(best[0])
            found.append(best)
            now = best[1]
        return found

    def add_groups(self, temperature: float) -> None:
        """Add the passes of decoding, cached prefixes and batches. The first group with errors beyond rounding names the cause of its
        own and of later groups."""
        first = 0
        for name, group in zip((DECODING, PREFIX, BATCH), self.found.groups, strict=False):
            part = slice(first, first + len(group))
            first += len(group)
            if self.exceeds(self.reported[part], self.now[part], group, temperature):
                self.add(name, ADVICE[name], [*self.now[: part.start], *self.reported[part.start :]])
                if name == DECODING and self.found.scored is None:
                    self.advice[name] = (
                        f"{ADVICE[OTHER]}; the server cannot score given tokens, so decoding is not told apart from that"
                    )
                return

    async def check_draws(self) -> None:
        """Check that the tokens are draws from the distribution that the server reports."""
        if self.sampling.temperature != 1 or self.sampling.truncated or self.advice:
            return
        columns = await self.reference.columns(self.samples, ("entropy",))
        for phrase in judge_draws([c["log_probs"] for c in columns], [c["entropy"] for c in columns]):
            self.findings.append(Finding(DRAWS, ADVICE[DRAWS], detail=phrase))

    def check_tokenizer(self) -> None:
        """Compare the tokens that the server makes of a text."""
        text = PLAIN_PROMPTS[0]
        own, theirs = list(self.reference.run.tokenizer(text)["input_ids"]), self.server.tokenize(text)
        if theirs is None:
            self.found.missing.append(Cause(TOKENIZER, why="the server does not return the token ids of a text prompt"))
        elif theirs != own and theirs != [*self.server.added, *own]:
            detail = f"{text!r} has {len(own)} tokens {own[:5]}..., on the server {len(theirs)} tokens {theirs[:5]}..."
            self.findings.append(Finding(TOKENIZER, ADVICE[TOKENIZER], detail=detail))


def _squares(errors: LogProbs) -> float:
    values = np.nan_to_num(np.concatenate(list(errors)), nan=_CUT, posinf=_CUT, neginf=-_CUT)
    return float((values.clip(-_CUT, _CUT) ** 2).sum())


def _clash(one: Deviation, other: Deviation) -> bool:
    """Return whether two deviations exclude each other."""
    same = [bool(getattr(one, name)) and bool(getattr(other, name)) for name in ("format", "cache", "before")]
    return one.name == other.name or any(same) or bool(one.entries.keys() & other.entries.keys())


def _shorten(error: MilesError) -> str:
    """Return the first reason of an error: that of a refused plan is in its second line with text."""
    lines = [line.strip().removeprefix("x ") for line in str(error).splitlines() if line.strip()]
    return (lines[1] if isinstance(error, PlanError) and len(lines) > 1 else lines[0])[:160]


def _generation_defaults(reference: Reference) -> dict[str, Any]:
    path = Path(reference.config.model.hf_checkpoint or "") / "generation_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
