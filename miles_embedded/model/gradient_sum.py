"""FP32 sums of the gradients of 16-bit parameters, to which kernels add."""

from __future__ import annotations

import torch
from torch import Tensor

#: Attribute of a parameter, or of its fake-quantised value: its ``GradientSum``; usually absent.
GRADIENT_SUM = "gradient_sum"


class GradientSum:
    """The gradient of the FP32 copy of a parameter that an optimizer steps.

    An autograd function whose kernel adds the parameter's gradient to this sum returns None for it. The gradients of several micro-batches are then
    neither rounded to 16 bits nor stored before they are added.
    """

    def __init__(self, master: Tensor) -> None:
        self.master = master

    def take(self, device: torch.device) -> tuple[Tensor, bool]:
        """Return the sum, contiguous, and whether it has gradients; otherwise its memory is not initialised and the caller overwrites it."""
        total = self.master.grad
        self.master.grad = (
            torch.empty(self.master.shape, dtype=torch.float32, device=device) if total is None else total.contiguous()
        )
        return self.master.grad, total is not None
