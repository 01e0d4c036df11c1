"""Megatron-Core's AdamW with its distributed optimiser, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronConfig

from miles_core import NonFiniteError
from miles_core.backend import OptimizerConfig


@contextmanager
def _looked_at(inner: Any, norm: float) -> Iterator[None]:
    """While this is open, Megatron-Core's optimiser takes its gradients as ready and of this norm, instead of doing both once more."""
    inner.prepare_grads, inner.get_grad_norm = lambda: False, lambda: norm
    try:
        yield
    finally:
        del inner.prepare_grads, inner.get_grad_norm


class Optimizer:
    """Steps the chunks; gradients are those that ``finalize_model_grads`` left.

    Args:
        chunks: wrapped in Megatron-Core's ``DistributedDataParallel``.
        settings: of AdamW.
        dtype: of parameters.
        options: fields of Megatron-Core's own configuration that were chosen.

    Attributes:
        step_number: optimiser steps done, the schedule's position.
        fixed_lr: takes the place of the schedule, which then does not advance.
    """

    def __init__(
        self, chunks: Sequence[Any], settings: OptimizerConfig, dtype: torch.dtype, options: Mapping[str, Any]
    ) -> None:
        self.settings = settings
        self.step_number = 0
        self.fixed_lr: float | None = None
        chosen = {n: getattr(torch, v) if n.endswith("_dtype") else v for n, v in options.items()}
        config = MegatronConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            **chosen,
        )
        # Groups of gloo exist only where there is no NCCL (start_groups).
        gloo = not torch.cuda.is_available()
        self.inner: ChainedOptimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=gloo)

    def step(self) -> dict[str, float]:
        """Clip, step, refresh the model copy. Returns ``grad_norm`` (before clipping) and ``lr``; raises NonFiniteError when the
        norm is not finite, and then nothing has changed."""
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient norm of optimiser step {self.step_number + 1} is {norm}; nothing was changed by this step: "
                "try a lower --lr, or look at this step's rewards and log-probs"
            )
        rate = self.settings.rate(self.step_number) if self.fixed_lr is None else self.fixed_lr
        for group in self.inner.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self.settings.weight_decay * group.get("wd_mult", 1.0)
        with _looked_at(self.inner, norm):
            self.inner.step()
        self.step_number += self.fixed_lr is None
        return {"grad_norm": norm, "lr": rate}

    def allocate(self) -> None:
        """Make the moments that the first step would make, so that they can be saved or loaded."""
        for part in self.inner.chained_optimizers:
            adam = part.optimizer
            if not isinstance(adam, torch.optim.AdamW):
                part.init_state_fn(adam, part.config)
                continue
            for parameter in (p for group in adam.param_groups for p in group["params"] if not adam.state[p]):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.zeros(()), **moments}

    def separate_counts(self) -> None:
        """Give each parameter of torch's AdamW a step count of its own; Megatron-Core loads one for all, which every one of them
        would count up."""
        for part in self.inner.chained_optimizers:
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].clone()

    def reset(self) -> None:
        """Forget moments and the schedule's position; masters stay."""
        self.step_number = 0
        for optimizer in self.inner.chained_optimizers:
            optimizer.optimizer.state.clear()
