"""AdamW on FP32 master weights, with a learning-rate schedule and clipping by the global norm.

A model copy in FP32 (or FP64) is its own master. A BF16 copy has a separate FP32 master, into which every micro-batch's
gradient is summed as soon as it is complete, so that neither the sum over micro-batches nor the step loses bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from miles_core.errors import NonFiniteError
from miles_embedded.trainer.optimizer_group import OptimizerGroup, group_of


@dataclass(frozen=True)
class OptimizerConfig:
    """Attributes:
    lr: peak learning rate.
    schedule: what follows the linear warm-up.
    warmup_steps: optimiser steps of warm-up; step s of them uses ``lr * (s + 1) / warmup_steps``.
    decay_steps: optimiser steps, warm-up included, until ``min_lr`` is reached.
    min_lr: where the decay ends.
    weight_decay: decoupled; not on biases, norms and other 1-D parameters.
    clip_grad: bound of the gradient's global norm; 0 is off.
    """

    lr: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 1
    min_lr: float = 0.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    clip_grad: float = 1.0


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of optimiser step ``step`` (from 0)."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(config.decay_steps - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    remaining = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * remaining


class Optimizer:
    """AdamW over named parameters of a model. Those of an ``OptimizerGroup`` are clipped, decayed and stepped as it says.

    Attributes:
        masters: parameter name -> the tensor that is stepped; its ``grad`` is the step's gradient.
        step_number: optimiser steps done, the schedule's position.
        fixed_lr: takes the place of the schedule, which then does not advance.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.config = config
        self.step_number = 0
        self.fixed_lr: float | None = None
        self.copies: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters: dict[str, Tensor] = {n: self._master(p) for n, p in self.copies.items()}
        self._names: dict[OptimizerGroup | None, list[str]] = {None: []}
        for name, parameter in self.copies.items():
            self._names.setdefault(group_of(parameter), []).append(name)
        self._adam = _adamw({g: [self.masters[n] for n in names] for g, names in self._names.items()}, config)

    def _master(self, copy: nn.Parameter) -> Tensor:
        if copy.dtype in (torch.float32, torch.float64):
            return copy
        master = copy.detach().float().clone().requires_grad_()

        def collect(parameter: Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

        copy.register_post_accumulate_grad_hook(collect)
        return master

    def reset(self) -> None:
        """Forget the moments and the schedule's position; masters stay."""
        self.step_number = 0
        self._adam.state.clear()

    def zero_grad(self) -> None:
        """Forget gradients."""
        for master in self.masters.values():
            master.grad = None

    def step(self) -> dict[str, float]:
        """Clip, step, refresh the model copy. Returns ``grad_norm`` (before clipping; of further groups ``grad_norm/NAME``) and
        ``lr``; raises NonFiniteError when a norm is not finite, and then nothing has changed."""
        grads = {
            g: [m.grad for n in names if (m := self.masters[n]).grad is not None] for g, names in self._names.items()
        }
        norms = {g: float(torch.nn.utils.get_total_norm(each)) if each else 0.0 for g, each in grads.items()}
        for norm in norms.values():
            if not math.isfinite(norm):
                raise NonFiniteError(self._blame(norm))
        for group, norm in norms.items():
            bound = self.config.clip_grad if group is None else group.clip_grad
            if 0 < bound < norm:
                torch._foreach_mul_(grads[group], bound / norm)
            if group is not None and group.renewed:
                self._renew(group)
        rate = learning_rate(self.config, self.step_number) if self.fixed_lr is None else self.fixed_lr
        for each in self._adam.param_groups:
            own = each["miles_group"]
            each["lr"] = rate if own is None or own.lr is None else own.lr
        self._adam.step()
        self.refresh()
        self.zero_grad()
        self.step_number += self.fixed_lr is None
        further = {f"grad_norm/{g.name}": norm for g, norm in norms.items() if g is not None and grads[g]}
        return {"grad_norm": norms[None], "lr": rate, **further}

    @torch.no_grad()
    def _renew(self, group: OptimizerGroup) -> None:
        """Take what is in the model copy as the group's masters, and forget its moments."""
        for name in self._names[group]:
            self.masters[name].copy_(self.copies[name])
            self._adam.state.pop(self.masters[name], None)
        group.renewed = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the model copy."""
        apart = [(c, self.masters[n]) for n, c in self.copies.items() if c is not self.masters[n]]
        if apart:
            torch._foreach_copy_([c for c, _ in apart], [m for _, m in apart])

    def _blame(self, norm: float) -> str:
        bad = [n for n, m in self.masters.items() if m.grad is not None and not bool(m.grad.isfinite().all())]
        where = f"first in {bad[0]} ({len(bad)} of {len(self.masters)} parameters)" if bad else "only in their sum"
        return (
            f"the gradient norm of optimiser step {self.step_number + 1} is {norm}, {where}; nothing was changed by "
            "this step: try a lower --lr, or look at this step's rewards and log-probs"
        )

    def tensors(self) -> dict[str, Tensor]:
        """Moments and their step counts, and masters where they are apart from the model copy, by ``exp_avg.<parameter>``
        and so on."""
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if master is not self.copies[name]:
                out[f"master.{name}"] = master.detach()
            out |= {f"{key}.{name}": value for key, value in self._adam.state.get(master, {}).items()}
        return out

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], step_number: int) -> None:
        """Inverse of ``tensors``; the model copy must already hold its weights. KeyError names a missing tensor."""
        self.reset()
        self.step_number = step_number
        for name, master in self.masters.items():
            if master is not self.copies[name]:
                master.copy_(tensors[f"master.{name}"])
            if f"step.{name}" in tensors:
                fused = self._adam.defaults.get("fused")
                self._adam.state[master] = {
                    "step": tensors[f"step.{name}"].to(master.device if fused else "cpu", copy=True),
                    **{
                        key: tensors[f"{key}.{name}"].to(master.device, master.dtype, copy=True)
                        for key in ("exp_avg", "exp_avg_sq")
                    },
                }


def _adamw(masters: dict[OptimizerGroup | None, list[Tensor]], config: OptimizerConfig) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = []
    for group, members in masters.items():
        decay = config.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        decayed, others = ([m for m in members if (m.dim() > 1) is many] for many in (True, False))
        groups.append({"params": decayed, "weight_decay": decay, "miles_group": group})
        groups.append({"params": others, "weight_decay": 0.0, "miles_group": group})
    device = next(m for members in masters.values() for m in members).device.type
    how = {"fused": True} if device in ("cpu", "cuda") else {"foreach": True}
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, **how
    )
