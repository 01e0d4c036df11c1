"""Seconds of the training phase: forward and backward passes in a pipeline, collectives, and the optimizer.

A layer's pass takes the time of its products at the efficiency that training reaches, plus the collectives of tensor, context and expert
parallelism, and never less than a fixed time for its launches. A backward pass counts as two forward passes, recomputation as another one.
A pipeline of p stages adds (p - 1) / v passes to those of its micro-batches (Narayanan et al., arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miles_planner.layout import TrainerLayout
from miles_planner.model_cost import ModelCost
from miles_planner.rates import Rates
from miles_planner.workload import Workload

#: Bytes that the optimizer reads and writes per parameter: gradient, two moments, master and weight.
_OPTIMIZER_BYTES = 30.0
#: Bytes per second of a processor's memory per GPU, for an optimizer in host memory.
_HOST_MEMORY = 25e9


@dataclass(frozen=True)
class TrainingTime:
    """Estimate for one step, in seconds.

    Attributes:
        passes: forward and backward passes of the training.
        extra: forward passes for the reference model and old log-probs.
        optimizer: reduction of gradients, optimizer and gathering of weights.
        moved: moving the trainer's memory to the host and back, when engines share its GPUs.
        used: fraction of the GPUs' BF16 peak that the training pass uses.
        bubble: fraction of the passes in which a stage of the pipeline waits for the others.
    """

    passes: float
    extra: float
    optimizer: float
    moved: float
    used: float
    bubble: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole phase."""
        return self.passes + self.extra + self.optimizer + self.moved


def training_time(
    rates: Rates, cost: ModelCost, t: TrainerLayout, work: Workload, colocated: bool = False
) -> TrainingTime:
    """Estimate the seconds of a step's training."""
    steps = max(work.optimizer_steps, 1)
    per_batch = (t.samples or max(math.floor(t.tokens / work.tokens), 1)) * work.tokens
    batches = max(math.ceil(work.samples * work.tokens / (t.dp * steps * per_batch)), 1)
    tokens = min(per_batch, work.samples * work.tokens / (t.dp * steps))
    forward = stage_seconds(rates, cost, t, tokens, work.tokens)
    slots = batches + (t.pp - 1) / t.virtual
    passes = steps * slots * forward * (3 + t.recompute)
    extra = steps * slots * forward * work.extra_forwards
    optimizer = steps * _optimizer_seconds(rates, cost, t)
    seen = work.tokens / 2  # tokens to which a token attends, on average
    operations = work.samples * work.tokens * (6 * cost.active + 6 * cost.attending(seen) * cost.attended * seen)
    used = operations / (passes * t.ranks * rates.gpu.bf16)
    return TrainingTime(
        passes, extra, optimizer, _moved_seconds(rates, cost, t) if colocated else 0.0, used, 1 - batches / slots
    )


def stage_seconds(rates: Rates, cost: ModelCost, t: TrainerLayout, tokens: float, context: float) -> float:
    """Seconds of the forward pass of one micro-batch through the slowest stage: the largest one, or the last one with the output layer.

    Args:
        tokens: tokens of the micro-batch on one replica.
        context: tokens of a sample.
    """
    size = cost.size
    local = tokens / t.cp
    layer = (cost.active - size.vocab * size.hidden) / size.layers
    attending = cost.attending(context / 2) / size.layers
    operations = local * (2 * layer + attending * cost.attended * context) / t.tp
    speed = _speed(rates, cost, t)
    held = 2 * size.layer / t.tp if not cost.moe else 2 * (size.attention / t.tp + size.routed / (t.ep * t.etp))
    products = max(operations / speed, held / (rates.gpu.memory * rates.efficiency["decode_memory"]))
    sparse = size.sparse_layers / size.layers
    fixed, fixed_moe = (rates.gpu.launch * rates.seconds[name] for name in ("train_layer", "train_layer_moe"))
    each = max(products, fixed) + sparse * (fixed_moe - fixed)
    each += _collectives(rates, cost, t, local) + sparse * _exchange(rates, cost, t, local)
    head = 2 * local * size.vocab * size.hidden / t.tp / (rates.gpu.bf16 * rates.efficiency["train_dense"])
    return max(t.stage_layers * each, (t.last_layers or t.stage_layers) * each + head)


def _speed(rates: Rates, cost: ModelCost, t: TrainerLayout) -> float:
    """Operations per second in a layer's products."""
    reached = rates.efficiency[f"train_{'moe' if cost.moe else 'dense'}{t.modules}"]
    if t.precision not in ("fp8", "mxfp8") or not rates.gpu.fp8 or t.modules:
        return rates.gpu.bf16 * reached
    return rates.gpu.fp8 * rates.efficiency["train_fp8"] * reached / rates.efficiency["train_dense"]


def _collectives(rates: Rates, cost: ModelCost, t: TrainerLayout, local: float) -> float:
    """Seconds of a layer's tensor- and context-parallel collectives, and of gathering its weights if they are sharded."""
    width, seconds = 2.0 * cost.size.hidden, 0.0
    if t.tp > 1:
        seconds += 4 * local * width * (t.tp - 1) / t.tp / (rates.link(t.tp) * rates.efficiency["link"])
    if t.cp > 1:
        cached = 2.0 * cost.size.cached / cost.size.layers
        seconds += local * cached * (t.cp - 1) / (rates.link(t.tp * t.cp) * rates.efficiency["link"])
    if t.sharded and t.ranks > 1:
        seconds += 2.0 * cost.size.parameters / cost.size.layers / (rates.link(t.ranks) * rates.efficiency["link"])
    return seconds


def _exchange(rates: Rates, cost: ModelCost, t: TrainerLayout, local: float) -> float:
    """Seconds in which a layer sends tokens to their experts and back."""
    group = t.ep * t.etp
    if group == 1:
        return 0.0
    sent = local / t.tp * min(cost.top_k * t.etp, group) * 2.0 * cost.size.hidden * (group - 1) / group
    return 2 * sent / (rates.link(group) * rates.efficiency["exchange"])


def _optimizer_seconds(rates: Rates, cost: ModelCost, t: TrainerLayout) -> float:
    parameters = cost.size.parameters
    mine = parameters / t.ranks
    gpu = (1 - t.offloaded) * mine * _OPTIMIZER_BYTES / (rates.gpu.memory * rates.efficiency["decode_memory"])
    host = t.offloaded * mine * (_OPTIMIZER_BYTES / _HOST_MEMORY + 6.0 / rates.gpu.host)
    held = parameters / (t.pp * t.tp * (t.ep if cost.moe else 1))
    sent = 6.0 * held / (rates.link(t.ranks) * rates.efficiency["link"]) if t.dp > 1 else 0.0
    return gpu + host + sent


def _moved_seconds(rates: Rates, cost: ModelCost, t: TrainerLayout) -> float:
    """Seconds in which the trainer's weights, gradients and optimizer state leave the GPU and return."""
    moved = cost.size.parameters * (6.0 + 12.0 * (1 - t.offloaded)) / t.ranks
    return 2 * moved / (rates.gpu.host * rates.efficiency["link"])
