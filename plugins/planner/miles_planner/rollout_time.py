"""Seconds that engines take to generate the samples of a step.

A decoding step reads the weights that its tokens use and the cache and states of its sequences, or computes, whichever takes longer, plus times
that do not depend on the batch. A batch drains: short responses end early, and the last ones decode almost alone. So the estimate
adds up steps over the changing batch instead of assuming one rate (a synchronous rollout reaches about a quarter of the full batch's).
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from miles_planner.layout import EngineLayout
from miles_planner.model_cost import ModelCost
from miles_planner.rates import Rates
from miles_planner.workload import Workload, response_lengths

#: Number of sequences that represent those of one engine.
_REPRESENTED = 128
#: Share of its response that a running sequence has generated, on average.
_GENERATED = 0.6


@dataclass(frozen=True)
class RolloutTime:
    """Estimate for one step.

    Attributes:
        seconds: from the first request to the last response, or the time of a step's tokens with continuous generation.
        running: sequences that an engine decodes at once at the start.
        tokens_per_second: response tokens of all engines over ``seconds``.
        full_rate: response tokens per second of all engines with a full batch.
    """

    seconds: float
    running: int
    tokens_per_second: float
    full_rate: float


def decode_step_seconds(rates: Rates, cost: ModelCost, e: EngineLayout, batch: float, context: float) -> float:
    """Seconds of one decoding step.

    Args:
        batch: sequences of one engine.
        context: mean tokens of a sequence in the cache.
    """
    size = cost.size
    weights = e.weights * e.pp * cost.touched(batch) / size.parameters
    attending = cost.attending(context)
    cache = context * e.token_bytes * attending / max(size.attending, 1) + 2 * e.state_bytes
    memory = weights + batch * cache * e.pp / e.dp
    operations = batch * (2 * cost.active + 2 * attending * cost.attended_cache * context)
    peak = rates.gpu.fp8 if e.precision in ("fp8", "mxfp8") and rates.gpu.fp8 else rates.gpu.bf16
    compute = operations / e.tp / (peak * rates.efficiency["prefill"])
    layer = rates.seconds["decode_layer"] + (rates.seconds["decode_layer_network"] if e.gpus > rates.machine else 0.0)
    fixed = rates.seconds["decode_step"] + size.layers * layer
    return max(memory / (rates.gpu.memory * rates.efficiency["decode_memory"]), compute) + fixed


def running_sequences(e: EngineLayout, work: Workload, continuous: bool = False) -> int:
    """Sequences that one engine decodes at once: limited by its slots, its cache and its share of the samples.

    With continuous generation, samples of ``work.lag`` further steps are generated at the same time."""
    held = work.prompt + _GENERATED * work.response + e.state_bytes / max(e.token_bytes, 1.0)
    samples = work.samples * (1 + work.lag if continuous else 1)
    return max(min(e.slots, int(e.cache / max(held, 1.0)), math.ceil(samples / e.count)), 1)


def rollout_time(
    rates: Rates, cost: ModelCost, e: EngineLayout, work: Workload, continuous: bool = False
) -> RolloutTime:
    """Estimate the seconds of a step's generation.

    Args:
        continuous: engines always have a full batch, because requests of later steps follow at once.
    """
    share = math.ceil(work.samples / e.count)
    slots = running_sequences(e, work, continuous)
    context = work.prompt + _GENERATED * work.response
    full = slots / decode_step_seconds(rates, cost, e, slots, context)
    prefill = share * work.prompt * 2 * cost.active / (e.gpus * rates.gpu.bf16 * rates.efficiency["prefill"])
    if continuous:
        seconds = prefill + share * work.response / full
    else:
        seconds = prefill + _drain(rates, cost, e, work, share, slots)
    return RolloutTime(seconds, slots, work.samples * work.response / seconds, full * e.count)


def _drain(rates: Rates, cost: ModelCost, e: EngineLayout, work: Workload, share: int, slots: int) -> float:
    """Add up decoding steps until the last response of one engine has ended."""
    count = min(share, _REPRESENTED)
    each = share / count  # sequences that one represents
    lengths = response_lengths(work.response, work.longest, count)
    waiting = list(lengths)
    random.Random(0).shuffle(waiting)
    room = max(round(slots / each), 1)
    running = [(length, 0.0) for length in waiting[:room]]  # (step at which it ends, step at which it started)
    waiting = waiting[room:]
    heapq.heapify(running)
    at = seconds = started = 0.0
    started = sum(start for _, start in running)
    while running:
        end, start = heapq.heappop(running)
        live = len(running) + 1
        if end > at:
            context = work.prompt + (at + end) / 2 - started / live
            seconds += (end - at) * decode_step_seconds(rates, cost, e, live * each, context)
            at = end
        started -= start
        if waiting:
            heapq.heappush(running, (at + waiting.pop(), at))
            started += at
    return seconds
