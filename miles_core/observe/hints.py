"""Hints: rules from what metrics do to what usually helps, shown in the log as a run goes and in its report.

A rule looks at one metric's values so far; a metric that a run does not have never triggers one. Rules are data, and
``Hints`` takes any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import fmean, median
from typing import Any

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
    """

    name: str
    metric: str
    when: Condition
    seen: str
    advice: str
    unless: tuple[str, Condition] | None = None


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
        "on a mixture of experts replay the rollout's routing (--plugins r3); weigh tokens by importance "
        "(--plugins tis)",
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
        "raise --aux-loss-coef",
    ),
)


class Hints:
    """Follows a run and reports each rule once per metric.

    Args:
        rules: those to follow.
        keep: how many last values of a metric are kept beside its first 20.
    """

    def __init__(self, rules: Iterable[Rule] = RULES, keep: int = 200) -> None:
        self._rules = tuple(rules)
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


def review(records: Iterable[Mapping[str, Any]], rules: Iterable[Rule] = RULES) -> list[Hint]:
    """What the rules say about the records of a run, in order of appearance."""
    hints = Hints(rules)
    return [hint for record in records for hint in hints.of(record, record["step"])]


def for_error(error: BaseException) -> str | None:
    """What helps against an exception, where a rule knows: memory that ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            "memory ran out: lower --micro-batch-size or --max-tokens-per-gpu, then --rollout-batch-size; a shorter "
            "--rollout-max-response-len also helps"
        )
    return None


def _short(value: float) -> str:
    return f"{value:.3g}"
