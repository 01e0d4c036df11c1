"""Hints: rules from what metrics do to what usually helps, shown in the log as a run goes and in its report.

A rule looks at one metric's values so far; a metric that a run does not have never triggers one. Rules are data, and
``Hints`` takes any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from miles_core.errors import MismatchError, NonFiniteError
from miles_core.observe.metrics import RESERVED

Condition = Callable[[Sequence[float]], bool]


def not_finite() -> Condition:
    """The last value is NaN or infinite."""
    return lambda values: not math.isfinite(values[-1])


def above(limit: float, steps: int = 3) -> Condition:
    """The mean of the last ``steps`` values is over ``limit``; false before there are so many."""
    return lambda values: len(values) >= steps and fmean(values[-steps:]) > limit


def below(limit: float, steps: int = 3) -> Condition:
    """The mean of the last ``steps`` values is under ``limit``; false before there are so many."""
    return lambda values: len(values) >= steps and fmean(values[-steps:]) < limit


def jumped(factor: float, steps: int = 20) -> Condition:
    """The last value is over ``factor`` times the median of the ``steps`` before it."""
    return lambda values: len(values) > steps and values[-1] > factor * abs(median(values[-steps - 1 : -1]))


def fell(fraction: float, steps: int = 5) -> Condition:
    """The mean of the last ``steps`` values is under ``fraction`` of the mean of the first ``steps``."""
    return lambda values: len(values) >= 2 * steps and fmean(values[-steps:]) < fraction * fmean(values[:steps])


def oscillates(swing: float, steps: int = 12) -> Condition:
    """Over the last ``steps`` changes the value turned around three times out of four, by ``swing`` on average."""

    def check(values: Sequence[float]) -> bool:
        if len(values) <= steps:
            return False
        changes = [b - a for a, b in pairwise(values[-steps - 1 :])]
        turns = sum(a * b < 0 for a, b in pairwise(changes))
        return turns >= 0.75 * (steps - 1) and fmean(map(abs, changes)) > swing

    return check


@dataclass(frozen=True)
class Rule:
    """When a metric behaves so, this helps.

    Attributes:
        name: identifies the rule; it speaks once a run and metric.
        metric: a metric's name or a glob of names.
        when: the condition on the metric's values so far (NaN where it was not finite).
        seen: what happened, with ``{metric}``, ``{value}`` (the last one) and ``{step}``.
        advice: what usually helps, most likely first.
        unless: (metric, condition) that makes the rule silent, e.g. a task that is solved.
        only: (fact, value) of the run without which the rule is silent, e.g. a number format.
    """

    name: str
    metric: str
    when: Condition
    seen: str
    advice: str
    unless: tuple[str, Condition] | None = None
    only: tuple[str, str] | None = None


@dataclass(frozen=True)
class Hint:
    """A rule that held."""

    rule: Rule
    metric: str
    step: int
    value: float

    def __str__(self) -> str:
        seen = self.rule.seen.format(metric=self.metric, value=_short(self.value), step=self.step)
        return f"step {self.step}: {seen}; {self.rule.advice}"


SOLVED = ("reward/mean", above(0.9))
MISMATCH = (
    "miles verify --budget tells by cause; on a mixture of experts replay the rollout's routing (--plugins r3), weigh "
    "tokens by importance (--plugins tis), and watch every sync (--verify-logprobs)"
)
UNSTABLE = (
    "lower --lr, keep --clip-grad at 1, look at the samples of that step; in a low precision, use block-wise scales "
    "and warm up in bfloat16; on a mixture of experts, replay the rollout's routing (--plugins r3)"
)

RULES = (
    Rule("not-finite", "train/*", not_finite(), "{metric} is {value}", UNSTABLE),
    Rule("gradient-jump", "train/grad_norm", jumped(20), "the gradient norm jumped to {value}", UNSTABLE),
    Rule(
        "mismatch",
        "mismatch/kl_k3",
        above(2e-3),
        "engine and trainer disagree by a KL of {value} per token (a dense bfloat16 model has about 6e-4)",
        MISMATCH,
    ),
    Rule(
        "mismatch-jump",
        "mismatch/kl_k3",
        jumped(10),
        "the KL between engine and trainer jumped to {value}, over ten times its median: collapse often follows",
        MISMATCH + "; lower --lr",
    ),
    Rule(
        "int4-mismatch",
        "mismatch/kl_k3",
        above(2e-3),
        "INT4 weights in the engine differ from what is trained by a KL of {value} per token",
        "train with the same rounding (--train-precision int4), take a smaller group (--int4-group-size 32), leave "
        "sensitive layers alone (--int4-skip-layers), start from a model that was warmed up in bfloat16, and use a "
        "higher --lr than in bfloat16",
        only=("rollout.precision", "int4"),
    ),
    Rule(
        "verify-jump",
        "verify/abs_log_prob",
        jumped(10, 3),
        "after the last sync engine and trainer disagree by {value} nats a token, ten times more than before it",
        "a part of the weights did not arrive, or one side changed its number format; miles verify --budget --load RUN "
        "says which",
    ),
    Rule(
        "effective-samples",
        "*/ess",
        below(0.5),
        "{metric}: the importance weights leave an effective sample size of {value} of the tokens",
        "engine and trainer are far apart: find the cause (miles verify --budget), replay the rollout's routing "
        "(--plugins r3), bound weights per token (--tis-level token), lower --lr or take fewer steps per rollout",
    ),
    Rule(
        "weights-at-bound",
        "*/fraction_truncated_high",
        above(0.1),
        "{metric}: {value} of the importance weights are cut at their upper bound, which biases the gradient",
        "take fewer optimiser steps per rollout (--num-steps-per-rollout), replay the rollout's routing (--plugins r3), "
        "or find the cause of the mismatch (miles verify --budget)",
    ),
    Rule(
        "vetoed",
        "*/fraction_vetoed",
        above(0.05),
        "{metric}: {value} of the tokens are in sequences that were dropped as a whole",
        "some tokens have almost no probability in the trainer: miles verify shows which; "
        "check that both sides use the same sampler (--full-vocab-logprobs off) and number format",
    ),
    Rule(
        "entropy-collapse",
        "train/entropy",
        fell(0.1),
        "the policy's entropy fell to {value}, under a tenth of where it began, before the task was solved",
        "raise --eps-clip-high (0.28) or --entropy-coef (0.001 to 0.01), or lower --lr",
        unless=SOLVED,
    ),
    Rule(
        "no-signal",
        "reward/all_equal",
        above(0.9, 5),
        "in {value} of the groups all rewards are equal, and no gradient comes from those",
        "check the reward on some responses (samples.jsonl), use easier or harder prompts, or raise "
        "--n-samples-per-prompt",
        unless=SOLVED,
    ),
    Rule(
        "truncated",
        "rollout/truncated",
        above(0.3, 5),
        "{value} of the responses are cut at the length limit",
        "raise --rollout-max-response-len, or reward shorter answers",
        unless=SOLVED,
    ),
    Rule(
        "clipped",
        "train/clip_fraction_*",
        above(0.3, 5),
        "{metric}: {value} of the tokens are clipped, so the policy moves far within one rollout",
        "lower --lr or take fewer optimiser steps per rollout",
    ),
    Rule(
        "reference-drift",
        "train/ref_kl",
        above(1.0, 5),
        "the policy is {value} nats per token away from the reference model",
        "raise --kl-loss-coef or lower --lr",
    ),
    Rule(
        "expert-imbalance",
        "*/expert_imbalance",
        above(4.0, 5),
        "the busiest expert gets {value} times its share of the tokens",
        "raise --aux-loss-coef (0.001 to 0.01)",
    ),
    Rule(
        "low-acceptance",
        "*/accept_rate",
        below(0.5, 5),
        "{metric}: only {value} of the drafted tokens are accepted",
        "draft fewer tokens at a time (--spec-lookahead auto), train the draft more often (--online-sft-interval) or "
        "faster (--draft-lr), or start it anew from the target (--reinit-draft-interval)",
    ),
    Rule(
        "slow-speculation",
        "*/speedup",
        below(1.0, 5),
        "{metric}: speculation makes the rollout slower, {value} times the speed without it",
        "use a draft of a quarter to a tenth of the target's size, and see where the time goes (--profile-speculative)",
    ),
    Rule(
        "sync-fallback",
        "*/fallbacks",
        above(0, 1),
        "{metric}: {value} weight syncs took the standard path instead of the one asked for; nothing was lost",
        "the log says why at the first of them; it costs time only",
    ),
    Rule(
        "policies-oscillate",
        "*/reward/mean",
        oscillates(0.1),
        "{metric} goes up and down from step to step, so the policies chase each other",
        "let them take turns (strategy: alternating), with a longer --co-evolution-interval, or a larger population",
    ),
)


class Hints:
    """Follows a run and reports each rule once per metric.

    Args:
        rules: those to follow.
        keep: how many last values of a metric are kept beside its first 20.
        facts: the run's options, for rules that speak of some runs only.
    """

    def __init__(self, rules: Iterable[Rule] = RULES, keep: int = 200, facts: Mapping[str, Any] | None = None) -> None:
        known = facts or {}
        self._rules = tuple(r for r in rules if r.only is None or str(known.get(r.only[0])) == r.only[1])
        self._keep = keep
        self._history: dict[str, list[float]] = {}
        self._told: set[tuple[str, str]] = set()
        self._step = 0

    def of(self, metrics: Mapping[str, Any], step: int | None = None) -> list[Hint]:
        """Take the metrics of ``step``, by default the one after the last call's, with None or NaN where a value was
        not finite; returns the hints that are new."""
        step = self._step = self._step + 1 if step is None else step
        for name, value in metrics.items():
            if name not in RESERVED:
                past = self._history.setdefault(name, [])
                past.append(math.nan if value is None else float(value))
                if len(past) > self._keep + 20:
                    del past[20]
        fresh = []
        for rule in self._rules:
            if rule.unless is not None and rule.unless[1](self._history.get(rule.unless[0]) or [math.nan]):
                continue
            for name in metrics:
                if name in RESERVED or (rule.name, name) in self._told or not fnmatchcase(name, rule.metric):
                    continue
                if rule.when(self._history[name]):
                    self._told.add((rule.name, name))
                    fresh.append(Hint(rule, name, step, self._history[name][-1]))
        return fresh


def review(
    records: Iterable[Mapping[str, Any]], rules: Iterable[Rule] = RULES, facts: Mapping[str, Any] | None = None
) -> list[Hint]:
    """What the rules say about the records of a run, in order of appearance; ``facts`` as for ``Hints``."""
    hints = Hints(rules, facts=facts)
    return [hint for record in records for hint in hints.of(record, record["step"])]


def for_error(error: BaseException) -> str | None:
    """What helps against an exception, where a rule knows: memory that ran out, numbers that are not finite, sides that
    disagree."""
    if isinstance(error, NonFiniteError):
        return f"what usually helps: {UNSTABLE}"
    if isinstance(error, MismatchError):
        return f"what usually helps: {MISMATCH}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            "memory ran out: lower --micro-batch-size or --max-tokens-per-gpu, then --rollout-batch-size; a shorter "
            "--rollout-max-response-len also helps; experts can be divided (--expert-model-parallel-size) or kept on the "
            "CPU (--offload-experts)"
        )
    return None


def _short(value: float) -> str:
    return f"{value:.3g}"
