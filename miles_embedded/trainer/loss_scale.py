"""Dynamic loss scaling for training in FP16 (Micikevicius et al., arXiv 1710.03740, section 3.2).

The smallest positive FP16 number is 2^-24, and many gradients are smaller. The loss is therefore multiplied by a scale S before the
backward pass, and the FP32 gradients are divided by S before the optimizer step. If S is too large, a gradient overflows: that step is
skipped and S is halved. After ``window`` steps in a row without an overflow, S is doubled. All values of S are powers of two times the
initial one, so scaling changes no digit of a gradient that neither overflows nor underflows.
"""

from __future__ import annotations

import torch
from torch import nn

#: Below this scale scaling cannot prevent an overflow: the unscaled gradient overflows as well.
SMALLEST = 1.0


class LossScale:
    """The scale of the loss, changed after every optimizer step.

    Args:
        value: initial scale.
        window: steps without an overflow after which the scale is doubled.

    Attributes:
        value: current scale.
        clean: steps since the last overflow or change of the scale.
    """

    def __init__(self, value: float = 2.0**16, window: int = 2000) -> None:
        self.value, self.window, self.clean = value, window, 0

    def accept(self) -> None:
        """Record a step without an overflow."""
        self.clean += 1
        if self.clean >= self.window:
            self.value, self.clean = self.value * 2, 0

    def can_shrink(self) -> bool:
        """Whether a smaller scale may avoid the overflow."""
        return self.value / 2 >= SMALLEST

    def shrink(self) -> None:
        """Record an overflow."""
        self.value, self.clean = self.value / 2, 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint stores."""
        return {"value": self.value, "clean": self.clean}

    def load_state(self, state: dict[str, float]) -> None:
        """Inverse of ``state``."""
        self.value, self.clean = float(state["value"]), int(state["clean"])


def make_loss_scale(model: nn.Module, initial: float, window: int) -> LossScale | None:
    """Make the loss scale of a model; None unless FP16 weights of it are trained."""
    trained = any(p.dtype == torch.float16 and p.requires_grad for p in model.parameters())
    return LossScale(initial, window) if trained else None
