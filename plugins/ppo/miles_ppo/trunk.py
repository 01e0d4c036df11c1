"""A critic that shares the policy's trunk: a value head on its last hidden states, trained by the policy's backward pass.

The loss is the policy loss plus ``--value-loss-coef`` times the value loss (arXiv 1707.06347, eq. 9). The head has its own learning rate
and its own bound on the norm of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from miles_core.data import WeightUnit
from miles_core.plugin import Policy, Run
from miles_core.trainer import OptimizerConfig
from miles_embedded import VALUE_HEAD, OptimizerGroup, add_value_head, new_value_head, optimizer_group
from miles_ppo.config import PpoConfig

#: Optimizer group of the head.
GROUP = "critic"


class TrunkHead(nn.Module):
    """A value head whose gradient can be kept out of the trunk.

    Attributes:
        inner: the head, [rows, hidden] -> [rows] or [rows, 1].
        detached: whether the hidden states are constants for the head. Set between steps, not during a pass.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.detached = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute values."""
        values: Tensor = self.inner(hidden.detach() if self.detached else hidden)
        return values


class TrunkCritic:
    """The head on one policy's model in this process, with its schedule.

    Args:
        run, policy: the run and the policy.
        model: the policy's model in the trainer; gets the head.

    Attributes:
        steps: number of completed optimizer steps, the position in the schedule.
    """

    def __init__(self, run: Run, policy: Policy, model: nn.Module) -> None:
        config = run.config_of(policy)
        self.options: PpoConfig = config.plugin("ppo")
        self.steps = 0
        self.head = TrunkHead(new_value_head(run, policy, model))
        self._schedule = replace(
            OptimizerConfig.of(config),
            lr=self.options.lr,
            schedule=self.options.lr_schedule,
            warmup_steps=self.options.lr_warmup_iters,
            min_lr=self.options.min_lr,
        )
        clip = config.train.clip_grad if self.options.clip_grad is None else self.options.clip_grad
        self.group = OptimizerGroup(GROUP, self.options.lr, self.options.weight_decay, clip)
        optimizer_group(self.head.parameters(), self.group)
        add_value_head(model, self.head)

    def start(self, step: int) -> None:
        """Prepare a step of the run: set whether the trunk learns from the value loss, and the learning rate."""
        self.head.detached = self.options.detach_trunk or step < self.options.only_steps

    def optimizer_step(self, inner: Any) -> dict[str, float]:
        """Run the optimizer with the head's learning rate of this step; returns the metrics of ``inner`` and ``lr/critic``."""
        self.group.lr = self._schedule.rate(self.steps)
        metrics: dict[str, float] = inner()
        self.steps += 1
        return {**metrics, f"lr/{GROUP}": self.group.lr}


def without_head(units: Iterator[WeightUnit]) -> Iterator[WeightUnit]:
    """Yield the weights of an export stream without the value head, which no engine and no checkpoint for inference has."""
    for unit in units:
        kept = {name: tensor for name, tensor in unit.tensors.items() if not name.startswith(f"{VALUE_HEAD}.")}
        if kept:
            yield unit if len(kept) == len(unit.tensors) else replace(unit, tensors=kept)
