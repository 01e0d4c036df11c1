"""Hints in a run's log and report: those of core, and those that installed plugins bring in their manifests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from miles_core.errors import MismatchError, NonFiniteError
from miles_core.observe.metrics import RESERVED
from miles_core.plugin.hint import Hint, above, below, fell, jumped, not_finite

if TYPE_CHECKING:
    from miles_core.plugin.manifest import Plugin

SOLVED = ("reward/mean", above(0.9))
#: Gradient norms below it come from rounding alone.
ZERO_GRADIENT = 1e-10
LEARNING = ("train/grad_norm", above(ZERO_GRADIENT))
MISMATCH = "miles verify --budget tells by cause; watch every sync (--verify-logprobs)"
UNSTABLE = (
    "lower --lr, keep --clip-grad at 1, look at the samples of that step; in a low precision, use block-wise scales "
    "and warm up in bfloat16"
)

HINTS = (
    Hint("not-finite", "train/*", not_finite(), "{metric} is {value}", UNSTABLE, trouble="instability"),
    Hint(
        "gradient-jump",
        "train/grad_norm",
        jumped(20, least=1.0),  # where clipping begins; where nothing is left to learn any gradient is a jump
        "the gradient norm jumped to {value}",
        UNSTABLE,
        trouble="instability",
    ),
    Hint(
        "mismatch",
        "mismatch/kl_k3",
        above(2e-3),
        "engine and trainer disagree by a KL of {value} per token (a dense bfloat16 model has about 6e-4)",
        MISMATCH,
        trouble="mismatch",
    ),
    Hint(
        "mismatch-jump",
        "mismatch/kl_k3",
        jumped(10, least=1e-5),  # far under any bfloat16 model's, and over what float32 rounds
        "the KL between engine and trainer jumped to {value}, over ten times its median: collapse often follows",
        f"lower --lr; {MISMATCH}",
        trouble="mismatch",
    ),
    Hint(
        "verify-jump",
        "verify/abs_log_prob",
        jumped(10, 3, least=1e-4),
        "after the last sync engine and trainer disagree by {value} nats a token, ten times more than before it",
        "a part of the weights did not arrive, or one side changed its number format; miles verify --budget --load RUN "
        "says which",
    ),
    Hint(
        "entropy-collapse",
        "train/entropy",
        fell(0.1),
        "the policy's entropy fell to {value}, under a tenth of where it began, before the task was solved",
        "raise --eps-clip-high (0.28) or --entropy-coef (0.001 to 0.01), or lower --lr",
        unless=(SOLVED,),
    ),
    Hint(
        "no-signal",
        "reward/all_equal",
        above(0.9, 5),
        "in {percent} of the groups all rewards are equal, and the gradient is zero",
        "check the reward on some responses (miles report shows them), use easier or harder prompts, or raise "
        "--n-samples-per-prompt",
        unless=(SOLVED, LEARNING),  # a loss that does not come from the reward, as in distillation
    ),
    Hint(
        "no-gradient",
        "train/grad_norm",
        below(ZERO_GRADIENT, 3),
        "the gradient norm has been {value} for three steps although rewards differ: the run cannot learn",
        "check that weights to train have requires_grad, that the loss depends on output.log_probs, and that no correction or loss "
        "mask removes every token",
        unless=(("reward/all_equal", above(0.9)),),
    ),
    Hint(
        "truncated",
        "rollout/truncated",
        above(0.3, 5),
        "{percent} of the responses are cut at the length limit",
        "raise --rollout-max-response-len, or reward shorter answers",
        unless=(SOLVED,),
    ),
    Hint(
        "clipped",
        "train/clip_fraction_*",
        above(0.3, 5),
        "{metric}: {percent} of the tokens are clipped, so the policy moves far within one rollout",
        "lower --lr or take fewer optimiser steps per rollout",
    ),
    Hint(
        "reference-drift",
        "train/ref_kl",
        above(1.0, 5),
        "the policy is {value} nats per token away from the reference model",
        "raise --kl-loss-coef or lower --lr",
    ),
    Hint(
        "expert-imbalance",
        "*/expert_imbalance",
        above(4.0, 5),
        "the busiest expert gets {value} times its share of the tokens",
        "raise --aux-loss-coef (0.001 to 0.01)",
    ),
)


def hints_of(plugins: Iterable[Plugin], holds: Callable[[str], bool]) -> tuple[Hint, ...]:
    """The hints of one run: core's, then those of the installed plugins, each with the remedies against its trouble.

    Args:
        plugins: manifests, of active plugins and of others.
        holds: whether a condition is known to hold in the run (``Plan.holds``).
    """
    plugins = tuple(plugins)
    remedies = [r for plugin in plugins for r in plugin.remedies if holds(r.when)]

    def complete(hint: Hint) -> Hint:
        helps = [r.advice for r in remedies if r.trouble == hint.trouble]
        return replace(hint, advice="; ".join([hint.advice, *helps]))

    known = (*HINTS, *(hint for plugin in plugins for hint in plugin.hints))
    return tuple(complete(hint) for hint in known if holds(hint.when))


@dataclass(frozen=True)
class Advice:
    """A hint whose metric behaved so."""

    hint: Hint
    metric: str
    step: int
    value: float

    def __str__(self) -> str:
        seen = self.hint.seen.format(
            metric=self.metric, value=f"{self.value:.3g}", percent=f"{self.value:.0%}", step=self.step
        )
        return f"step {self.step}: {seen}; {self.hint.advice}"


class Hints:
    """Follows a run and gives each hint's advice once per metric.

    Args:
        known: the hints to follow (``hints_of``).
        keep: how many last values of a metric are kept beside its first 20.
    """

    def __init__(self, known: Iterable[Hint] = HINTS, keep: int = 200) -> None:
        self.known = tuple(known)
        self._keep = keep
        self._history: dict[str, list[float]] = {}
        self._told: set[tuple[str, str]] = set()
        self._step = 0

    def of(self, metrics: Mapping[str, Any], step: int | None = None) -> list[Advice]:
        """Take the metrics of ``step``, by default the one after the last call's, with None or NaN where a value was
        not finite; returns the advice that is new."""
        step = self._step = self._step + 1 if step is None else step
        for name, value in metrics.items():
            if name not in RESERVED:
                past = self._history.setdefault(name, [])
                past.append(math.nan if value is None else float(value))
                if len(past) > self._keep + 20:
                    del past[20]
        fresh = []
        for hint in self.known:
            if any(behaviour(self._history.get(metric) or [math.nan]) for metric, behaviour in hint.unless):
                continue
            for name in metrics:
                if name in RESERVED or (hint.name, name) in self._told or not fnmatchcase(name, hint.metric):
                    continue
                if hint.behaviour(self._history[name]):
                    self._told.add((hint.name, name))
                    fresh.append(Advice(hint, name, step, self._history[name][-1]))
        return fresh


def review(records: Iterable[Mapping[str, Any]], known: Iterable[Hint] = HINTS) -> list[Advice]:
    """What the hints say about the records of a run, in order of appearance."""
    hints = Hints(known)
    return [advice for record in records for advice in hints.of(record, record["step"])]


def for_error(error: BaseException, known: Iterable[Hint] = HINTS) -> str | None:
    """What helps against an exception, where that is known: memory that ran out, numbers that are not finite, sides that
    disagree."""
    advice = {hint.name: hint.advice for hint in known}
    if isinstance(error, NonFiniteError):
        return f"what usually helps: {advice['not-finite']}"
    if isinstance(error, MismatchError):
        return f"what usually helps: {advice['mismatch']}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            "memory ran out: lower --micro-batch-size or --max-tokens-per-gpu, then --rollout-batch-size; a shorter "
            "--rollout-max-response-len also helps"
        )
    return None
