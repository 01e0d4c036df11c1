"""Megatron-Core's AdamW with its distributed optimizer, and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from miles_core.plugin import MilesError, NonFiniteError
from miles_core.trainer import OptimizerConfig


@contextmanager
def _reuse_norm(inner: Any, norm: float) -> Iterator[None]:
    """Make Megatron-Core's optimizer use the prepared gradients and this norm instead of computing them again."""
    inner.prepare_grads, inner.get_grad_norm = lambda: False, lambda: norm
    try:
        yield
    finally:
        del inner.prepare_grads, inner.get_grad_norm


def _number_parameters(inner: ChainedOptimizer) -> None:
    """Correct the places of parameters in their groups, by which Megatron-Core 0.19 finds their states: it numbers them in the order of
    the gradient buffers, but a group has FP32 parameters first, which may be in a later buffer."""
    for part in inner.chained_optimizers:
        for index, (single, half) in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
            for place, parameter in enumerate((*single, *half)):
                part.model_param_group_index_map[parameter] = (index, place)


def _name_parameters(inner: ChainedOptimizer, chunks: Sequence[Any]) -> None:
    """Add ``param_names`` to the groups of an optimizer, as torch does for named parameters; ``--record-steps`` reads them.

    A group updates this rank's elements of parameters in FP32, then those of masters of other parameters."""
    prefixes = [f"chunks.{number}." if len(chunks) > 1 else "" for number in range(len(chunks))]
    names = {
        id(parameter): prefix + name
        for prefix, chunk in zip(prefixes, chunks, strict=True)
        for name, parameter in chunk.module.named_parameters()
    }
    for part in inner.chained_optimizers:
        groups = zip(part.optimizer.param_groups, part.model_fp32_groups, part.model_float16_groups, strict=True)
        for group, single, half in groups:
            group["param_names"] = [names[id(parameter)] for parameter in (*single, *half)]


class Shard:
    """The elements of a parameter that this rank updates.

    Args:
        part: the optimizer of Megatron-Core that updates them.
        parameter: the parameter, whole.
        first, end: the elements, ``end`` exclusive.
    """

    def __init__(self, part: Any, parameter: Tensor, first: int, end: int) -> None:
        self._part, self.parameter, self.first, self.end = part, parameter, first, end

    @property
    def states(self) -> dict[str, Tensor]:
        """Master weights ("param") and moments, flat; in float32 also if the optimizer stores them in another type."""
        part = self._part
        found = part._get_main_param_and_optimizer_states(self.parameter)
        return {name: found[name].detach().float().view(-1) for name in ("param", *part.optimizer_state_keys)}

    @torch.no_grad()
    def store(self, states: dict[str, Tensor]) -> None:
        """Replace the states by these."""
        old = self._part._get_main_param_and_optimizer_states(self.parameter)
        self._part._set_main_param_and_optimizer_states(self.parameter, {**old, **states})


class Optimizer:
    """Optimizer of this rank's chunks; uses the gradients after ``finalize_model_grads``.

    Args:
        chunks: chunks wrapped in Megatron-Core's ``DistributedDataParallel``.
        settings: settings of AdamW.
        dtype: dtype of parameters.
        options: the user's fields of Megatron-Core's ``OptimizerConfig``.

    Attributes:
        step_number: number of completed optimizer steps, the position in the schedule.
        fixed_lr: if set, replaces the schedule, which then does not advance.
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
        # start_groups creates gloo groups only without CUDA
        gloo = not torch.cuda.is_available()
        self.inner: ChainedOptimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=gloo)
        _number_parameters(self.inner)
        _name_parameters(self.inner, chunks)

    def configure(self, settings: Mapping[str, float]) -> None:
        """See ``Trainer.configure``. Raises MilesError for the coefficients of Adam."""
        if adam := [name for name in settings if name.startswith("adam_")]:
            raise MilesError(f"--trainer megatron cannot change {adam[0]} while running")
        self.settings = replace(self.settings, **settings)  # type: ignore[arg-type]
        for part in self.inner.chained_optimizers:
            part.config.clip_grad = self.settings.clip_grad

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.settings.rate(self.step_number) if self.fixed_lr is None else self.fixed_lr

    def norm(self) -> float:
        """Return the gradient norm over all ranks. A collective.

        Raises:
            NonFiniteError: the norm is not finite."""
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient norm of optimizer step {self.step_number + 1} is {norm}; this step changed no weights: try a lower --lr, "
                "or check this step's rewards and log-probs"
            )
        return norm

    def step(self, norm: float, rate: float) -> None:
        """Clip the gradients, whose norm is ``norm``, run one step with learning rate ``rate``, and update the model's parameters."""
        for group in self.inner.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self.settings.weight_decay * group.get("wd_mult", 1.0)
        with _reuse_norm(self.inner, norm):
            self.inner.step()
        self.step_number += self.fixed_lr is None

    def allocate(self) -> None:
        """Allocate the moments that the first step would allocate, so that they can be saved or loaded."""
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
        """Number of steps in the moments; call ``allocate`` first."""
        groups = self.inner.chained_optimizers[0].state_dict()["optimizer"]["param_groups"]
        return int(groups[0].get("step") or 0)

    def shards(self) -> Iterator[Shard]:
        """Yield the elements that this rank updates; call ``allocate`` first."""
        for part in self.inner.chained_optimizers:
            for bucket in (b for buffer in part.gbuf_ranges for buckets in buffer.values() for b in buckets):
                for parameter, where in bucket["param_map"].items():
                    yield Shard(part, parameter, where["param"].start, where["param"].end)

    def set_steps(self, steps: int) -> None:
        """Set the number of steps in the moments."""
        for part in self.inner.chained_optimizers:
            state = part.state_dict()
            for group in state["optimizer"]["param_groups"]:
                group["step"] = steps
            part.load_state_dict(state)
        self.separate_counts()

    def finish_load(self) -> None:
        """Pass loaded states to the inner optimizers of Megatron-Core's hybrid optimizer (``--optimizer-cpu-offload``)."""
        for part in self.inner.chained_optimizers:
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                part.optimizer._sync_hdo_state_to_sub_optimizers()

    def separate_counts(self) -> None:
        """Give each parameter of torch's AdamW its own step count. Megatron-Core loads one shared tensor, which each parameter would
        increment."""
        for part in self.inner.chained_optimizers:
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].clone()

    def reset(self) -> None:
        """Reset the moments and the step number; masters are unchanged."""
        self.step_number = 0
        for optimizer in self.inner.chained_optimizers:
            optimizer.optimizer.state.clear()
