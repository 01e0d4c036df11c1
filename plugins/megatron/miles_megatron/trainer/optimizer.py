"""Megatron-Core's AdamW with its distributed optimiser, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig as MegatronConfig, get_megatron_optimizer

from miles_core.plugin import NonFiniteError
from miles_core.trainer import OptimizerConfig


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

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.settings.rate(self.step_number) if self.fixed_lr is None else self.fixed_lr

    def norm(self) -> float:
        """Of the gradients of all ranks; NonFiniteError when it is not finite. A collective."""
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient norm of optimiser step {self.step_number + 1} is {norm}; nothing was changed by this step: "
                "try a lower --lr, or look at this step's rewards and log-probs"
            )
        return norm

    def step(self, norm: float, rate: float) -> None:
        """Clip gradients of this ``norm``, step at learning rate ``rate``, refresh the model copy."""
        for group in self.inner.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self.settings.weight_decay * group.get("wd_mult", 1.0)
        with _looked_at(self.inner, norm):
            self.inner.step()
        self.step_number += self.fixed_lr is None

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

    @property
    def steps(self) -> int:
        """Steps that its moments have seen; they must be allocated."""
        groups = self.inner.chained_optimizers[0].state_dict()["optimizer"]["param_groups"]
        return int(groups[0].get("step") or 0)

    def sharded_moments(self, model: Any, loading: bool, how: Mapping[str, Any]) -> dict[str, Any]:
        """Moments and masters by their parameters' names, for a checkpoint that other parallel sizes can read. What else Megatron-Core's
        optimiser would put there the first rank would write, and for its own parts.

        Args:
            model: the sharded state of the chunks.
            loading: it is to be read.
            how: Megatron-Core's metadata.
        """
        parts = self.inner.chained_optimizers
        found = [part.sharded_state_dict(model, is_loading=loading, metadata=how) for part in parts]
        return {str(i): each["param_state"] for i, each in enumerate(found)}

    def load_moments(self, found: Mapping[str, Any], steps: int, how: Mapping[str, Any]) -> None:
        """Inverse of ``sharded_moments``, after so many steps."""
        for i, part in enumerate(self.inner.chained_optimizers):
            state = part.state_dict()
            for group in state["optimizer"]["param_groups"]:
                group["step"] = steps
            kind = how["distrib_optim_sharding_type"]
            part.load_state_dict(state | {"param_state": found[str(i)], "param_state_sharding_type": kind})
        self.separate_counts()

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
