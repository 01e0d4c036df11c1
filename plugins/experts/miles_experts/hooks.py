"""Hooks of the plugin: they limit, count, balance and offload the experts of the embedded trainer's models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles_core.data import Batch
from miles_core.plugin import Policy, Run, Store, hookimpl
from miles_core.trainer import Context, Output
from miles_embedded import ExpertLoads, is_embedded, routed_blocks, sum_over_ranks
from miles_experts.bias import correction_biases, update_biases
from miles_experts.capacity import DROPPED, count_dropped, limit_capacity
from miles_experts.config import ExpertsConfig
from miles_experts.loads import summarise, write_loads
from miles_experts.offload import offload_experts, on_device

#: Entry of a checkpoint with the loads since the beginning of the run.
TOTALS = "experts/loads"


@dataclass
class Trained:
    """The model of one policy in a trainer's process.

    Attributes:
        loads: counts the tokens of the current optimizer step.
        device: device of the model.
        biases: correction biases by layer; empty if they are not updated.
        totals: [experts] tokens since the beginning of the run, by layer.
    """

    loads: ExpertLoads
    device: torch.device
    biases: Sequence[Tensor]
    totals: list[Tensor] = field(default_factory=list)

    def end_step(self, rate: float) -> dict[str, float]:
        """Take the loads of an optimizer step, update the biases, and return the step's metrics. A collective."""
        loads = self.loads.take_counts(lambda value: sum_over_ranks(value, self.device))
        if self.biases:
            update_biases(self.biases, loads, rate)
        self.totals = [total + load for total, load in zip(self.totals, loads, strict=True)] if self.totals else loads
        return summarise(loads)


class Experts:
    """Capacity, balancing, offloading and statistics."""

    def __init__(self, options: ExpertsConfig) -> None:
        self.options = options
        self.trained: dict[str, Trained] = {}

    @hookimpl
    def on_model(self, policy: Policy, model: nn.Module, role: str) -> None:
        if not is_embedded(model) or not routed_blocks(model):
            return
        rate = self.options.router_bias_update_rate
        biases = correction_biases(model) if rate and role != "critic" else []  # the engine's have the same dtype
        if role == "rollout":
            return
        if self.options.capacity_factor is not None:
            limit_capacity(model, self.options.capacity_factor, self.options.token_drop_policy)
        if role in ("train", "shared") and policy.learns:
            self.trained[policy.name] = Trained(ExpertLoads(model), next(model.parameters()).device, biases)
        if self.options.offload:
            offload_experts(model)

    @hookimpl
    def wrap_forward(self) -> Callable[..., Any] | None:
        if self.options.capacity_factor is None:
            return None

        def wrap(inner: Callable[..., Output]) -> Callable[..., Output]:
            def forward(chunk: Any, micro_batch: Batch, ctx: Context) -> Output:
                if ctx.kind != "train":
                    return inner(chunk, micro_batch, ctx)
                ctx.attached[DROPPED] = []
                output = inner(chunk, micro_batch, ctx)
                ctx.metrics.update(count_dropped(ctx))
                return output

            return forward

        return wrap

    @hookimpl
    def wrap_optimizer_step(self, run: Run, policy: Policy) -> Callable[..., Any] | None:
        if policy.name not in self.trained:
            return None

        def wrap(inner: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
            def optimizer_step() -> dict[str, float]:
                metrics, trained = inner(), self.trained[policy.name]
                metrics = {**metrics, **trained.end_step(self.options.router_bias_update_rate)}
                if not dist.is_initialized() or dist.get_rank() == 0:
                    several = sum(p.role == "train" for p in run.policies) > 1
                    write_loads(run.directory / f"expert_loads{f'-{policy.name}' * several}.json", trained.totals)
                return metrics

            return optimizer_step

        return wrap

    @hookimpl
    def wrap_weights(self, policy: Policy) -> Callable[..., Any] | None:
        if not self.options.offload or policy.name not in self.trained:
            return None
        device = self.trained[policy.name].device
        return lambda inner: lambda: on_device(inner(), device)

    @hookimpl
    def on_save(self, run: Run, policy: Policy | None, store: Store) -> None:
        if policy is not None and policy.name in self.trained:
            totals = self.trained[policy.name].totals
            store.put(TOTALS, {str(layer): total for layer, total in enumerate(totals)})

    @hookimpl
    def on_load(self, run: Run, policy: Policy | None, store: Store) -> None:
        if policy is not None and policy.name in self.trained and TOTALS in store.names():
            found = store.get(TOTALS)[0]
            self.trained[policy.name].totals = [found[str(layer)] for layer in range(len(found))]
