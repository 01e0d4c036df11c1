"""How servers compute the log-probabilities that they report: temperature, truncation, penalties, applied or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from miles_core.contracts.engine import Sampling
from miles_core.data.sample import Sample

#: Penalties, thresholds and temperatures of the server's own that are tried.
_PENALTIES = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
_REPETITIONS = (1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)
_MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
_TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)
_KEEP = (
    "send the server's parameters explicitly in training, or train on the processed log-probs of the same distribution"
)
_NO_PENALTY = (
    "set repetition_penalty 1, presence_penalty 0 and frequency_penalty 0 in every request: the server has defaults "
    "(generation_config.json; vLLM: --generation-config vllm)"
)
_ONE_SUPPORT = (
    "train without truncation (top-p 1, top-k -1, min-p 0), or normalise the trainer's log-probs over the same tokens; "
    "vLLM's --logprobs-mode raw_logprobs reports those of the whole vocabulary"
)


@dataclass(frozen=True)
class Processing:
    """From the model's distribution to the reported log-probabilities.

    Attributes:
        name, advice: the cause in words, and what to do.
        temperature: divisor of the logits. top_p, top_k, min_p: the distribution is normalised over the tokens that they keep.
        penalty: subtracted from the logits of tokens that occurred, ``counted``: once per occurrence; ``in_prompt``: also in the prompt.
        repetition: divisor of the positive logits of tokens that occurred, and factor of the negative ones.
        fitted: whether a penalty, min-p or temperature is a value that was tried, and not one that was requested.
    """

    name: str
    advice: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    penalty: float = 0.0
    repetition: float = 1.0
    counted: bool = False
    in_prompt: bool = False
    fitted: bool = False

    @property
    def plain(self) -> bool:
        """Whether the reported log-probabilities are those of the model."""
        return replace(self, name="", advice="", fitted=False) == Processing("")

    @property
    def kind(self) -> tuple[bool, ...]:
        """What is changed, without by how much."""
        changed = (self.top_p < 1, self.top_k > 0, self.min_p > 0, self.penalty != 0, self.repetition != 1)
        return (*changed, self.counted, self.in_prompt, self.fitted)

    def apply(self, sample: Sample, tokens: np.ndarray, log_probs: np.ndarray, normalizer: np.ndarray) -> np.ndarray:
        """Compute the reported log-probabilities.

        Args:
            sample: of n response tokens.
            tokens, log_probs: the whole distribution at temperature 1, [n, vocabulary], most likely token first.
            normalizer: [n] logits of the model minus ``log_probs``.

        Returns:
            [n] float64.
        """
        response = np.asarray(sample.tokens[sample.prompt_length :])
        logits = log_probs.astype(np.float64)
        if self.penalty:
            logits = logits - self.penalty * self._occurrences(sample, tokens)
        if self.repetition != 1:  # unlike the other steps, it depends on a constant that is added to all logits
            logits = logits + normalizer.astype(np.float64)[:, None]
            changed = np.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits = np.where(self._occurrences(sample, tokens) > 0, changed, logits)
        logits /= self.temperature
        chosen = tokens == response[:, None]
        if self.top_p < 1 or self.top_k > 0 or self.min_p > 0:
            logits = np.where(self._find_kept(logits) | chosen, logits, -np.inf)  # the server kept what it sampled
        most = logits.max(-1, keepdims=True)
        total = np.log(np.exp(logits - most).sum(-1)) + most[:, 0]
        found: np.ndarray = logits[chosen] - total
        return found

    def _occurrences(self, sample: Sample, tokens: np.ndarray) -> np.ndarray:
        counts = np.zeros(int(tokens.max()) + 1)
        found: np.ndarray = np.empty(tokens.shape)
        for token in sample.tokens[: sample.prompt_length] if self.in_prompt else ():
            counts[token] += 1
        for position, token in enumerate(sample.tokens[sample.prompt_length :]):
            found[position] = counts[tokens[position]]
            counts[token] += 1
        return found if self.counted else np.minimum(found, 1)

    def _find_kept(self, logits: np.ndarray) -> np.ndarray:
        """Return bool [n, vocabulary]: the tokens that min-p, top-k and top-p keep, for rows in any order."""
        order = np.argsort(-logits, -1, kind="stable")
        ranked = np.take_along_axis(logits, order, -1)
        p = np.exp(ranked - ranked.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        kept = (np.cumsum(p, -1) - p < self.top_p) & (p >= self.min_p * p[:, :1])
        if self.top_k > 0:
            kept &= np.arange(logits.shape[-1]) < self.top_k
        result: np.ndarray = np.empty_like(kept)
        np.put_along_axis(result, order, kept, -1)
        return result


def find_processings(wanted: Sampling, defaults: Mapping[str, Any]) -> Iterator[Processing]:
    """Yield the ways in which a server may compute its log-probabilities other than training does.

    Args:
        wanted: the requested sampling parameters.
        defaults: the checkpoint's ``generation_config.json``, whose values some servers use for parameters that a request lacks.
    """
    t = wanted.temperature
    if t != 1:
        yield Processing(
            f"raw log-probs: the temperature {t:g} is not applied to them",
            "start vLLM with --logprobs-mode processed_logprobs, or compute the trainer's log-probs at temperature 1 too",
        )
        yield Processing(
            f"the temperature {t:g} is applied twice",
            "divide the logits by the temperature in one place only: the server already does",
            t * t,
        )
    top_p, top_k = float(defaults.get("top_p") or 1), int(defaults.get("top_k") or -1)
    for p, k, origin in ((wanted.top_p, wanted.top_k, "requested"), (top_p, top_k, "of generation_config.json")):
        if p < 1 or k > 0:
            kept = " and ".join([f"top-p {p:g}"] * (p < 1) + [f"top-k {k}"] * (k > 0))
            yield Processing(
                f"log-probs are normalised over the tokens that {kept} keep ({origin})",
                _ONE_SUPPORT,
                t,
                p,
                k,
            )
    for value in _PENALTIES:
        for counted in (False, True):
            for in_prompt in (False, True):
                yield _penalised(t, value, counted, in_prompt)
    for value in _put_first(defaults.get("repetition_penalty"), _REPETITIONS):
        for in_prompt in (False, True):
            yield _divided(t, value, in_prompt)
    for value in _put_first(defaults.get("min_p"), _MIN_P):
        yield _above(t, value)
    for other in _TEMPERATURES:
        if abs(other - t) > 0.01:
            yield _at_temperature(other, t)


def find_neighbours(one: Processing, wanted: Sampling, factor: float) -> Iterator[Processing]:
    """Yield processings whose fitted value is ``factor`` times as large or as small; none if ``one`` has no fitted value."""
    for change in (factor, 1 / factor) if one.fitted else ():
        if one.penalty:
            yield _penalised(one.temperature, one.penalty * change, one.counted, one.in_prompt)
        elif one.repetition != 1:
            yield _divided(one.temperature, one.repetition * change, one.in_prompt)
        elif one.min_p:
            yield _above(one.temperature, one.min_p * change)
        else:
            yield _at_temperature(one.temperature * change, wanted.temperature)


def _put_first(default: Any, tried: Sequence[float]) -> list[float]:
    """Return the default of generation_config.json, if it has one that changes something, and then the values that are always tried."""
    usable = isinstance(default, int | float) and default > 0 and default != 1
    return [float(default), *tried] if usable else [*tried]


def _penalised(temperature: float, value: float, counted: bool, in_prompt: bool) -> Processing:
    kind = "repeated tokens, by their number" if counted else "repeated tokens"
    where = " of prompt and response" if in_prompt else ""
    return Processing(
        f"a penalty of about {value:.2f} on {kind}{where}",
        _NO_PENALTY,
        temperature,
        penalty=value,
        counted=counted,
        in_prompt=in_prompt,
        fitted=True,
    )


def _divided(temperature: float, value: float, in_prompt: bool) -> Processing:
    where = " of prompt and response" if in_prompt else ""
    return Processing(
        f"a repetition penalty of about {value:.2f}, by which logits of repeated tokens{where} are divided",
        _NO_PENALTY,
        temperature,
        repetition=value,
        in_prompt=in_prompt,
        fitted=True,
    )


def _above(temperature: float, value: float) -> Processing:
    return Processing(
        f"log-probs are normalised over the tokens that a min-p of about {value:.2g} keeps",
        f"set min_p 0 in every request: the server has a default (generation_config.json); or {_ONE_SUPPORT}",
        temperature,
        min_p=value,
        fitted=True,
    )


def _at_temperature(value: float, wanted: float) -> Processing:
    return Processing(
        f"log-probs at a temperature of about {value:.2f} in place of {wanted:g}", _KEEP, value, fitted=True
    )
