"""How long the parts of a run take: a decode step as a function of batch and context, prefill, training, a weight sync.

A decode step of an engine on g GPUs, with b requests whose contexts have C tokens together, takes

    floor(layers, g)  +  max(weights(b) / (g bandwidth), 2 active b / (g flops))  +  C kv / (g bandwidth)

seconds: launches and collectives, the matrix products (each limited by memory or by arithmetic), and reading the cache. A mixture of
experts reads the fraction 1 - (1 - active)^b of its experts. Rates are the GPU's peaks times the efficiencies below. A measured curve
replaces the first two terms by seconds per batch size.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from miles_core.errors import ConfigError
from miles_planner.simulation.hardware import Gpu
from miles_planner.simulation.model_shape import ModelShape

#: Seconds per layer of a decode step that do not depend on its size, on one GPU and on several. Fitted to the published latencies of one
#: request in docs/simulation.md (60 us per layer on 8 GPUs).
LAUNCH, LAUNCH_PARALLEL = 25e-6, 60e-6
#: Additional seconds per layer of an engine that spans machines: two all-reduces of 46.5 us (nccl-tests, 16 H20 of two machines over
#: InfiniBand, github.com/NVIDIA/nccl issue 1244) instead of 10.5 us (8 H20 of one machine, github.com/deepseek-ai/DeepEP issue 303).
LAUNCH_NETWORK = 72e-6
#: Fraction of the memory bandwidth that decoding reaches.
BANDWIDTH = 0.65
#: Fraction of the peak arithmetic that the products of large batches reach in decoding, and that prefill reaches with its attention.
DECODE_FLOPS, PREFILL_FLOPS = 0.6, 0.35
#: Bytes per second of a weight sync over all links, and its fixed seconds.
SYNC_BANDWIDTH, SYNC_FIXED = 30e9, 1.0


class Decode(Protocol):
    """Seconds of one decode step of an engine."""

    @property
    def per_token(self) -> float:
        """Seconds for each token of context."""
        ...

    def base(self, batch: int) -> float:
        """Return the seconds of a step with ``batch`` requests, without those for their context."""
        ...


@dataclass(frozen=True)
class Roofline:
    """A decode step computed from the sizes of model and GPU; see the module's docstring."""

    model: ModelShape
    gpu: Gpu
    gpus: int
    weight_bytes: float = 2.0
    bandwidth: float = BANDWIDTH
    floor: float | None = None

    @cached_property
    def per_token(self) -> float:
        return self.model.kv_bytes / self._bandwidth

    @cached_property
    def _bandwidth(self) -> float:
        return self.gpus * self.gpu.bandwidth * self.bandwidth

    @cached_property
    def _floor(self) -> float:
        """Seconds of launches and collectives."""
        if self.floor is not None:
            return self.floor
        layer = LAUNCH if self.gpus == 1 else LAUNCH_PARALLEL
        return self.model.layers * (layer + (LAUNCH_NETWORK if self.gpus > self.gpu.linked else 0.0))

    def base(self, batch: int) -> float:
        """Return the seconds of a step with ``batch`` requests, without those for their context."""
        model = self.model
        used = 1 - (1 - model.active_share) ** batch
        read = model.parameters - model.expert_parameters * (1 - used)
        arithmetic = 2 * model.active * batch / (self.gpus * self.gpu.flops * DECODE_FLOPS)
        return self._floor + max(read * self.weight_bytes / self._bandwidth, arithmetic)


@dataclass(frozen=True)
class Curve:
    """Measured seconds of a decode step by batch size, interpolated, and in proportion beyond the largest.

    Attributes:
        batches, seconds: the points, by ascending batch size.
        per_token: additional seconds per token of context.
    """

    batches: Sequence[int]
    seconds: Sequence[float]
    per_token: float = 0.0

    def base(self, batch: int) -> float:
        """Return the seconds of a step with ``batch`` requests, without those for their context."""
        if batch <= self.batches[0]:
            return self.seconds[0]
        at = min(bisect_left(self.batches, batch), len(self.batches) - 1)
        if batch >= self.batches[at]:
            return self.seconds[at] * batch / self.batches[at]
        (left, right), (low, high) = self.batches[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        return low + (high - low) * (batch - left) / (right - left)


def read_curve(path: Path | str) -> Curve:
    """Read a measured curve: a JSON object ``{"batches": [...], "seconds": [...], "per_token": x}``.

    Raises:
        ConfigError: the file cannot be read or has another form.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        curve = Curve(
            tuple(map(int, raw["batches"])), tuple(map(float, raw["seconds"])), float(raw.get("per_token", 0))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'--decode-curve {path}: {error}; give a JSON file {{"batches": [1, 8], "seconds": [0.01, 0.02], "per_token": 1e-7}}'
        ) from error
    batches, seconds = curve.batches, curve.seconds
    ascending = all(a < b for a, b in pairwise(batches))
    if (
        not batches
        or len(batches) != len(seconds)
        or not ascending
        or min(*seconds, *batches, 1) <= 0
        or curve.per_token < 0
    ):
        raise ConfigError(
            f"--decode-curve {path}: it needs as many batches, ascending from 1, as positive seconds, and a per_token of at least 0"
        )
    return curve


@dataclass(frozen=True)
class Speed:
    """The speed of one run's parts.

    Attributes:
        decode: of one engine.
        prefill: seconds of an engine per token without a cached key and value.
        train: seconds of the trainer per token, prompt and response.
        train_square: additional seconds per pair of tokens that attention connects: a sample of n tokens has n * n / 2.
        train_fixed: seconds of a training step in addition.
        sync: seconds from the pause of the engines to their next token.
        switch: with shared GPUs, seconds to move trainer or engines into the memory or out of it.
        cache: tokens in the cache of one engine.
    """

    decode: Decode
    prefill: float
    train: float
    sync: float
    train_square: float = 0.0
    train_fixed: float = 0.0
    switch: float = 0.0
    cache: float = float("inf")

    def training(self, lengths: Sequence[int]) -> float:
        """Return the seconds of one training step on samples of these lengths (prompt and response)."""
        pairs = sum(n * n for n in lengths) / 2
        return self.train_fixed + self.train * sum(lengths) + self.train_square * pairs
