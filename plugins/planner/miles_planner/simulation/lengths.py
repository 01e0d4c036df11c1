"""Distributions of prompt and response lengths, in tokens.

A length is a function of the seed and the number of its sample, so that every schedule generates the same responses.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from statistics import NormalDist

from miles_core.errors import ConfigError
from miles_tools.samples.files import read_rollouts

_NORMAL = NormalDist()
#: The accepted texts of a distribution.
FORMS = "constant:N, uniform:LOW,HIGH, lognormal:MEDIAN,SIGMA, run:DIRECTORY or replay:DIRECTORY"


def _normal_score(p: float) -> float:
    return _NORMAL.inv_cdf(min(max(p, 1e-12), 1 - 1e-12))


class Distribution(ABC):
    """A distribution of lengths, given by its quantiles."""

    @abstractmethod
    def quantile(self, p: float) -> float:
        """Return the length that a fraction ``p`` (0 to 1) of all lengths does not exceed."""

    def draw(self, number: int, p: float) -> float:
        """Return the length of sample or prompt ``number`` at the random quantile ``p``."""
        return self.quantile(p)


@dataclass(frozen=True)
class Constant(Distribution):
    """Every length is ``value``."""

    value: float

    def quantile(self, p: float) -> float:
        return self.value


@dataclass(frozen=True)
class Uniform(Distribution):
    """Uniform between ``low`` and ``high``."""

    low: float
    high: float

    def quantile(self, p: float) -> float:
        return self.low + p * (self.high - self.low)


@dataclass(frozen=True)
class LogNormal(Distribution):
    """Log-normal with this median; ``sigma`` is the standard deviation of the logarithm."""

    median: float
    sigma: float

    def quantile(self, p: float) -> float:
        return self.median * math.exp(self.sigma * _normal_score(p))


@dataclass(frozen=True)
class Empirical(Distribution):
    """The lengths that a run recorded, sorted."""

    values: tuple[int, ...]

    def quantile(self, p: float) -> float:
        return float(self.values[min(int(p * len(self.values)), len(self.values) - 1)])


@dataclass(frozen=True)
class Replay(Distribution):
    """The lengths that a run recorded, in the order of its samples or prompts; after the last one they are repeated."""

    values: tuple[int, ...]

    def quantile(self, p: float) -> float:
        return Empirical(tuple(sorted(self.values))).quantile(p)

    def draw(self, number: int, p: float) -> float:
        return float(self.values[number % len(self.values)])


def parse_distribution(text: str, flag: str, of_prompts: bool = False) -> Distribution:
    """Parse a distribution.

    Args:
        text: ``constant:N``, ``uniform:LOW,HIGH``, ``lognormal:MEDIAN,SIGMA``, ``run:DIRECTORY`` (drawn from the lengths of a run) or
            ``replay:DIRECTORY`` (the lengths of a run in its order).
        flag: its option, for messages.
        of_prompts: of a run, read the lengths of prompts instead of those of responses.

    Raises:
        ConfigError: the text has another form, or the run has no saved rollouts.
    """
    kind, _, rest = text.partition(":")
    if kind in ("run", "replay"):
        found = _read_lengths(rest, f"{flag} {text}", of_prompts)
        if kind == "run":
            return Empirical(tuple(sorted(length for _, length in found)))
        return Replay(tuple(length for _, length in sorted(dict(found).items())))
    try:
        numbers = [float(word) for word in rest.split(",")]
        made = {("constant", 1): Constant, ("uniform", 2): Uniform, ("lognormal", 2): LogNormal}[kind, len(numbers)]
    except (ValueError, KeyError):
        raise ConfigError(f"{flag} {text}: it is none of {FORMS}") from None
    if not all(math.isfinite(n) for n in numbers) or numbers[0] < 1:
        raise ConfigError(f"{flag} {text}: lengths are finite numbers of at least 1 token")
    if kind != "constant" and numbers[1] < (numbers[0] if kind == "uniform" else 0):
        raise ConfigError(f"{flag} {text}: {'HIGH is below LOW' if kind == 'uniform' else 'SIGMA is negative'}")
    distribution: Distribution = made(*numbers)
    return distribution


def _read_lengths(directory: str, origin: str, of_prompts: bool) -> list[tuple[int, int]]:
    """Return the number of each sample of a run, or of its prompt, with its length."""
    key, found = "group" if of_prompts else "index", []
    for number, row in enumerate(read_rollouts(directory)):
        response = row["response_length"]
        found.append((row.get(key, number), len(row["tokens"]) - response if of_prompts else response))
    if not found:
        raise ConfigError(
            f"{origin}: the directory has no saved rollouts (rollouts/train/*.jsonl.gz); give the directory of a run that was not "
            "started with --no-save-rollouts"
        )
    return found


class Lengths:
    """The lengths of a run's samples.

    Args:
        responses, prompts: the distributions.
        longest: the limit of a response; longer ones are cut there.
        group_size: samples per prompt.
        correlation: fraction of the variance of a response's normal score that its prompt determines, 0 to 1.
        seed: changes all lengths.
    """

    def __init__(
        self,
        responses: Distribution,
        prompts: Distribution,
        longest: int,
        group_size: int,
        correlation: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.responses, self.prompts, self.longest = responses, prompts, longest
        self.group_size, self.correlation, self.seed = group_size, correlation, seed

    def response(self, sample: int) -> int:
        """Return the number of tokens of the response of sample number ``sample``, 1 to ``longest``."""
        own = random.Random(f"{self.seed}/{sample}").random()
        if self.correlation:
            shared = random.Random(f"{self.seed}/group/{sample // self.group_size}").random()
            score = math.sqrt(1 - self.correlation) * _normal_score(own)
            own = _NORMAL.cdf(score + math.sqrt(self.correlation) * _normal_score(shared))
        return min(self.longest, max(1, round(self.responses.draw(sample, own))))

    def prompt(self, group: int) -> int:
        """Return the number of tokens of the prompt of group ``group``."""
        return max(1, round(self.prompts.draw(group, random.Random(f"{self.seed}/prompt/{group}").random())))
