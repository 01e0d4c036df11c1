"""Parameter groups with their own learning rate, weight decay and gradient clipping.

Clipping couples parameters: a large gradient of one part reduces the step of all. A group is therefore clipped by its own norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

_ATTRIBUTE = "miles_optimizer_group"


@dataclass(eq=False)
class OptimizerGroup:
    """Training options of some parameters.

    Attributes:
        name: name in metrics, ``grad_norm/NAME``.
        lr: constant learning rate; None uses the model's, including its schedule.
        warmup: number of the run's first optimizer steps in which ``lr`` rises linearly to its value.
        weight_decay: weight decay; None uses the model's.
        clip_grad: bound on the norm of the group's gradient; 0 disables clipping.
        renewed: set this after writing new values to the parameters. The next step starts from them, without optimizer state.
    """

    name: str
    lr: float | None = None
    weight_decay: float | None = None
    clip_grad: float = 1.0
    renewed: bool = False
    warmup: int = 0

    def rate(self, model: float, step: int) -> float:
        """Return the learning rate of the next step, after ``step`` completed ones; ``model`` is the model's rate in that step."""
        return model if self.lr is None else self.lr * min(1.0, (step + 1) / max(self.warmup, 1))


def optimizer_group(parameters: Iterable[nn.Parameter], group: OptimizerGroup) -> None:
    """Assign these parameters to ``group``; call it before the trainer is made, as in ``on_model``."""
    for parameter in parameters:
        setattr(parameter, _ATTRIBUTE, group)


def group_of(parameter: Any) -> OptimizerGroup | None:
    """Return the group of a parameter; None for the model's own group."""
    found: OptimizerGroup | None = getattr(parameter, _ATTRIBUTE, None)
    return found
