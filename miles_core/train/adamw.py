"""Provides AdamW (arXiv 1711.05101) with a policy's options, as the optimizers ``adamw`` and ``adam`` (an alias)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from miles_core.train.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from miles_core.contracts.run import Policy, Run


def make_optimizer(run: Run, policy: Policy, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Create the optimizer of a policy; ``groups`` as for ``torch.optim.Optimizer``."""
    return adamw(groups, OptimizerConfig.of(run.config_of(policy)))


def adamw(groups: Sequence[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Create AdamW for parameter groups that set their own weight decay."""
    device = groups[0]["params"][0].device.type
    how = {"fused": True} if device in ("cpu", "cuda") else {"foreach": True}
    return torch.optim.AdamW(list(groups), lr=config.lr, betas=config.betas, eps=config.eps, **how)
