"""How far two sides disagree about the same tokens: the numbers, and the tokens that disagree most.

``engine`` and ``trainer`` hold the log-probabilities of the sampled tokens under either side. With delta = trainer -
engine, mean(-delta) and mean(exp(delta) - 1 - delta) estimate KL(engine || trainer) (k1 is unbiased and noisy, k3 never
negative). A value that is not finite on either side counts as an infinite gap.
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
#: Tokens of context on each side of a token that is shown.
CONTEXT = 6
_CLAMP = 20.0
#: A coefficient of ``along`` with a larger standard error says nothing.
KNOWN = 0.25

Text = Callable[[list[int]], str]
LogProbs = Sequence[np.ndarray]


@dataclass(frozen=True)
class WorstToken:
    """One sampled token on which the sides disagree.

    Attributes:
        sample, position: the sample's running number, and the token's index in its response.
        token, text: its id and its decoded text; ``before`` and ``after``: the text around it.
        engine, trainer: the two log-probabilities.
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
    """The disagreement over ``tokens`` tokens, in nats a token; ``quantiles`` are those of \\|delta\\|, by probability."""

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
        """The numbers as metrics."""
        return {
            f"{prefix}/abs_log_prob": self.mean_abs,
            f"{prefix}/abs_log_prob_max": self.max_abs,
            f"{prefix}/kl_k1": self.kl_k1,
            f"{prefix}/kl_k3": self.kl_k3,
        }


def measure(engine: LogProbs, trainer: LogProbs, samples: Sequence[Sample] = (), text: Text | None = None) -> Gap:
    """The gap over the tokens of the samples' loss masks (all tokens where no samples are given).

    Args:
        engine, trainer: one array a sample, [response_length].
        samples: for masks and for the worst tokens.
        text: decodes token ids; without it no worst tokens are listed.
    """
    masks = [np.asarray(s.mask, bool) for s in samples] or [np.ones(len(e), bool) for e in engine]
    e = _flat(engine, masks)
    delta = _flat(trainer, masks) - e
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
        worst=() if text is None else _worst(size, engine, trainer, masks, samples, text),
    )


def ordinary(change: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Where neither side moved by more than nine tenths of its tokens did: [tokens] bool. On a mixture of experts a token whose
    route flipped moves by more than all others together, and so does the one unsure token of a confident model."""
    kept = np.ones(len(shift), bool)
    for values in (np.abs(change), np.abs(shift)) if len(shift) else ():
        kept &= values <= np.quantile(values, 0.9)
    return kept


def along(change: np.ndarray, shift: np.ndarray) -> tuple[float, float]:
    """How far ``change`` goes along ``shift`` (both [tokens]): the least-squares coefficient and its standard error over the
    ``ordinary`` tokens. NaN where there is no shift."""
    kept = ordinary(change, shift)
    change, shift = change[kept], shift[kept]
    length = float(shift @ shift)
    if not length:
        return math.nan, math.nan
    moved = float(change @ shift) / length
    rest = change - moved * shift
    return moved, math.sqrt(float(rest @ rest) / max(len(shift) - 1, 1) / length)


def _flat(values: LogProbs, masks: Sequence[np.ndarray]) -> np.ndarray:
    parts = [np.asarray(v, np.float64)[m] for v, m in zip(values, masks, strict=True)]
    return np.concatenate([np.zeros(0), *parts])


def _worst(
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
