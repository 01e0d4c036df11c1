"""Measures the disagreement of two sides on the same tokens, and lists the tokens that disagree most.

``engine`` and ``trainer`` hold the log-probabilities of the sampled tokens under either side. With delta = trainer -
engine, mean(-delta) and mean(exp(delta) - 1 - delta) estimate KL(engine || trainer) (k1 is unbiased and noisy, k3 never
negative). A non-finite value on either side counts as an infinite gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from miles_core.data.sample import Sample

QUANTILES = (0.5, 0.9, 0.99, 0.999)
WORST = 8
#: Number of context tokens shown on each side of a token.
CONTEXT = 6
_CLAMP = 20.0
#: A coefficient of ``along`` is not significant if its standard error is larger.
KNOWN = 0.25

Text = Callable[[list[int]], str]
LogProbs = Sequence[np.ndarray]


@dataclass(frozen=True)
class WorstToken:
    """One sampled token on which the sides disagree.

    Attributes:
        sample, position: index of the sample, and index of the token in its response.
        token, text: id and decoded text of the token; ``before`` and ``after``: the surrounding text.
        engine, trainer: log-probabilities of both sides.
    """

    sample: int
    position: int
    token: int
    text: str
    before: str
    after: str
    engine: float
    trainer: float

    @property
    def delta(self) -> float:
        """trainer - engine, in nats."""
        return self.trainer - self.engine

    def __str__(self) -> str:
        return (
            f"sample {self.sample} token {self.position} {self.text!r} (id {self.token}): engine {self.engine:.4f}, "
            f"trainer {self.trainer:.4f}, after {self.before!r}, before {self.after!r}"
        )


@dataclass(frozen=True)
class Gap:
    """The disagreement over ``tokens`` tokens, in nats per token; ``quantiles`` maps probabilities to quantiles of \\|delta\\|."""

    tokens: int
    mean_abs: float
    max_abs: float
    kl_k1: float
    kl_k3: float
    quantiles: dict[str, float]
    worst: tuple[WorstToken, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return the statistics as metrics."""
        return {
            f"{prefix}/abs_log_prob": self.mean_abs,
            f"{prefix}/abs_log_prob_max": self.max_abs,
            f"{prefix}/kl_k1": self.kl_k1,
            f"{prefix}/kl_k3": self.kl_k3,
        }


def measure(engine: LogProbs, trainer: LogProbs, samples: Sequence[Sample] = (), text: Text | None = None) -> Gap:
    """Measure the gap over the tokens in the samples' loss masks (all tokens if no samples are given).

    Args:
        engine, trainer: one array [response_length] per sample.
        samples: for masks and the worst tokens.
        text: decodes token ids; if None, no worst tokens are listed.
    """
    masks = [np.asarray(s.mask, bool) for s in samples] or [np.ones(len(e), bool) for e in engine]
    e = _flatten(engine, masks)
    delta = _flatten(trainer, masks) - e
    size = np.where(np.isfinite(delta), np.abs(delta), np.inf)
    if not len(size):
        return Gap(0, 0.0, 0.0, 0.0, 0.0, {str(q): 0.0 for q in QUANTILES})
    bounded = np.nan_to_num(delta, nan=_CLAMP, posinf=_CLAMP, neginf=-_CLAMP).clip(-_CLAMP, _CLAMP)
    quantiles = np.quantile(size, QUANTILES, method="inverted_cdf")
    return Gap(
        tokens=len(size),
        mean_abs=float(size.mean()),
        max_abs=float(size.max()),
        kl_k1=float(-bounded.mean()),
        kl_k3=float((np.expm1(bounded) - bounded).mean()),
        quantiles={str(q): float(v) for q, v in zip(QUANTILES, quantiles, strict=True)},
        worst=() if text is None else _find_worst(size, engine, trainer, masks, samples, text),
    )


def ordinary(change: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return bool [tokens]: False for the tokens whose movement on either side exceeds that side's 90 % quantile. This excludes outliers:
    in a mixture of experts, a token with a changed route moves by more than all others together, as does the one uncertain token of a
    confident model."""
    kept = np.ones(len(shift), bool)
    for values in (np.abs(change), np.abs(shift)) if len(shift) else ():
        kept &= values <= np.quantile(values, 0.9)
    return kept


def along(change: np.ndarray, shift: np.ndarray) -> tuple[float, float]:
    """Regress ``change`` on ``shift`` (both [tokens]): return the least-squares coefficient and its standard error over the ``ordinary``
    tokens. NaN if ``shift`` is 0."""
    kept = ordinary(change, shift)
    change, shift = change[kept], shift[kept]
    length = float(shift @ shift)
    if not length:
        return math.nan, math.nan
    moved = float(change @ shift) / length
    rest = change - moved * shift
    return moved, math.sqrt(float(rest @ rest) / max(len(shift) - 1, 1) / length)


def _flatten(values: LogProbs, masks: Sequence[np.ndarray]) -> np.ndarray:
    parts = [np.asarray(v, np.float64)[m] for v, m in zip(values, masks, strict=True)]
    return np.concatenate([np.zeros(0), *parts])


def _find_worst(
    size: np.ndarray,
    engine: LogProbs,
    trainer: LogProbs,
    masks: Sequence[np.ndarray],
    samples: Sequence[Sample],
    text: Text,
) -> tuple[WorstToken, ...]:
    places = [(i, int(p)) for i, mask in enumerate(masks) for p in mask.nonzero()[0]]
    found = []
    for at in np.argsort(-size, kind="stable")[:WORST]:
        i, position = places[at]
        sample = samples[i]
        place = sample.prompt_length + position
        tokens = sample.tokens
        found.append(
            WorstToken(
                sample=sample.index,
                position=position,
                token=tokens[place],
                text=text([tokens[place]]),
                before=text(tokens[max(place - CONTEXT, 0) : place]),
                after=text(tokens[place + 1 : place + 1 + CONTEXT]),
                engine=float(engine[i][position]),
                trainer=float(trainer[i][position]),
            )
        )
    return tuple(found)
