"""Parameters that are trained in their own way: another learning rate, weight decay and clip norm than the model's.

What is clipped together is coupled: a large gradient of one part shortens the step of all. So a group is clipped by its own norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

_ATTRIBUTE = "miles_optimizer_group"


@dataclass(eq=False)
class OptimizerGroup:
    """How some parameters are trained.

    Attributes:
        name: in metrics, ``grad_norm/NAME``.
        lr: constant learning rate; None follows the model's, schedule included.
        weight_decay: None is the model's.
        clip_grad: bound of the norm of the group's gradient; 0 is off.
        renewed: set by whoever wrote new values into the parameters; the next step then starts from these, without moments.
    """

    name: str
    lr: float | None = None
    weight_decay: float | None = None
    clip_grad: float = 1.0
    renewed: bool = False


def optimizer_group(parameters: Iterable[nn.Parameter], group: OptimizerGroup) -> None:
    """Let these parameters be trained as ``group`` says; before the trainer is made, as ``on_model`` is."""
    for parameter in parameters:
        setattr(parameter, _ATTRIBUTE, group)


def group_of(parameter: Any) -> OptimizerGroup | None:
    """The group of a parameter; None is the model's own."""
    found: OptimizerGroup | None = getattr(parameter, _ATTRIBUTE, None)
    return found
