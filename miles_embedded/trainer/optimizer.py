"""The trainer's optimizer (AdamW by default): FP32 master weights, a learning-rate schedule and clipping by the global norm.

An FP32 (or FP64) model is its own master. A BF16 model has a separate FP32 master, to which the gradient of every micro-batch is added
as soon as it is complete, so that neither the sum over micro-batches nor the step loses precision. The master of a sharded parameter is
the local shard. With ``offload``, masters and optimizer state are in host memory except during a step. An FP16 model has a loss scale
(``loss_scale``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.errors import ConfigError, NonFiniteError, PluginError
from miles_core.train.adamw import adamw
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.gradient_sum import GRADIENT_SUM, GradientSum
from miles_embedded.model.released import Released
from miles_embedded.model.storage import LocalShard, copy_to_host, device_of_hosted, local_shard
from miles_embedded.trainer.data_parallel import Alone
from miles_embedded.trainer.hosted import HostedMasters
from miles_embedded.trainer.loss_scale import LossScale
from miles_embedded.trainer.optimizer_group import OptimizerGroup, group_of

#: Makes an optimizer with torch's interface from parameter groups with ``params``, ``param_names`` and ``weight_decay``.
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Optimizer:
    """Steps the trainable parameters of a model. An ``OptimizerGroup`` overrides clipping, weight decay and learning rate.

    Args:
        model, config, parallel: the model, the options, and the data-parallel strategy.
        make: makes the optimizer; AdamW by default.
        loss_scale: scale of the loss whose gradients arrive, for FP16 models.
        offload: keep masters and optimizer state in host memory between steps.

    Attributes:
        masters: parameter name -> tensor to step; its ``grad`` is the step's gradient.
        step_number: number of completed optimizer steps, the position in the schedule.
        fixed_lr: learning rate that replaces the schedule, which then does not advance; None to use the schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        parallel: Alone | None = None,
        make: MakeOptimizer | None = None,
        loss_scale: LossScale | None = None,
        offload: bool = False,
    ) -> None:
        self.config, self.loss_scale = config, loss_scale
        self._parallel = parallel or Alone()
        self.step_number = 0
        self.fixed_lr: float | None = None
        self.copies: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        #: Parameters whose master is another tensor, in FP32.
        self._separate = {n for n, p in self.copies.items() if p.dtype not in (torch.float32, torch.float64)}
        self.masters: dict[str, Tensor] = {n: self._master(n, p) for n, p in self.copies.items()}
        hosted = any(device_of_hosted(p) is not None for p in self.copies.values())
        self._hosted = HostedMasters(self.copies, self.masters) if hosted else None
        self._names: dict[OptimizerGroup | None, list[str]] = {None: []}
        for name, parameter in self.copies.items():
            self._names.setdefault(group_of(parameter), []).append(name)
        groups = _groups({g: {n: self.masters[n] for n in names} for g, names in self._names.items()}, config)
        self._inner: torch.optim.Optimizer | None = None
        if groups:  # none for a frozen model
            self._inner = make(groups) if make is not None else adamw(groups, config)
        self._offload, self._offloaded = offload, Released(keep=True)
        with self.on_device():
            pass

    def _master(self, name: str, copy: nn.Parameter) -> Tensor:
        """Return the tensor that the optimizer steps for a parameter: the parameter itself, its local shard, or an FP32 copy of the shard.

        Gradients arrive at the parameter. If another tensor is returned, a hook adds them to its ``grad``, in its dtype, and drops them; kernels may
        add to it themselves (``GradientSum``).
        """
        shard = local_shard(copy)
        if name not in self._separate and not shard.sharded:
            return copy
        if (home := device_of_hosted(copy)) is not None:  # ``HostedMasters`` collects its gradients
            return copy_to_host(shard.tensor, home, torch.float32).requires_grad_()
        master = (
            shard.tensor.to(torch.float32, copy=True) if name in self._separate else shard.tensor
        ).requires_grad_()

        def collect(parameter: Tensor) -> None:
            grad, total = parameter.grad, master.grad
            if grad is None:  # a kernel added it to the sum
                return
            if shard.sharded:
                grad = local_shard(grad).tensor
            if total is None:
                master.grad = grad.to(master.dtype)
            else:
                total.add_(grad)
            parameter.grad = None

        copy.register_post_accumulate_grad_hook(collect)
        if not shard.sharded:
            setattr(copy, GRADIENT_SUM, GradientSum(master))
        return master

    def configure(self, settings: Mapping[str, float]) -> None:
        """See ``Trainer.configure``. Weight decay changes for matrices whose group has no value of its own."""
        self.config = self.config.with_settings(settings)
        for each in self._inner.param_groups if self._inner is not None else ():
            own = each["miles_group"]
            if each["params"][0].dim() > 1 and (own is None or own.weight_decay is None):
                each["weight_decay"] = self.config.weight_decay
            if "betas" in each:
                each["betas"], each["eps"] = self.config.betas, self.config.eps
            elif adam := [name for name in settings if name.startswith("adam_")]:
                raise ConfigError(f"the optimizer {type(self._inner).__name__} has no {adam[0]} that could change")

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep masters and optimizer state in device memory inside this context; see ``offload``."""
        if not self._offload:
            yield
            return
        self._offloaded.restore()
        try:
            yield
        finally:
            self._offloaded.release(self.memory())

    def reset(self) -> None:
        """Drop the optimizer state and restart the schedule; masters do not change."""
        self.step_number = 0
        if self._inner is not None:
            with self.on_device():
                self._inner.state.clear()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for master in self.masters.values():
            master.grad = None

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the loss scale, if there is one."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, if there is one; call it once, before the step."""
        if self.loss_scale is not None:
            grads = [m.grad for m in self.masters.values() if m.grad is not None]
            if grads:
                torch._foreach_mul_(grads, 1 / self.loss_scale.value)

    def step(self) -> dict[str, float]:
        """Clip the gradients, step, and update the model from the masters.

        Returns:
            ``grad_norm`` (before clipping; for further groups ``grad_norm/NAME``) and ``lr``. With a loss scale also ``loss_scale`` and
            ``skipped_steps``: 1 if a gradient overflowed, so that nothing changed but the scale.

        Raises:
            NonFiniteError: a norm is not finite, and a smaller loss scale cannot help; nothing has changed then.
        """
        if self._inner is None:
            raise ConfigError("no weight of this model is trained: all of them are frozen (requires_grad is False)")
        with self.on_device():
            return self._step(self._inner)

    def _step(self, inner: torch.optim.Optimizer) -> dict[str, float]:
        scale = self.loss_scale
        scaled = {} if scale is None else {"loss_scale": scale.value, "skipped_steps": 0.0}
        self._parallel.sum_gradients(self.masters.values())
        hosted = self._hosted.gradients() if self._hosted else {}
        grads = {
            g: [hosted.get(n, m.grad) for n in names if (m := self.masters[n]).grad is not None]
            for g, names in self._names.items()
        }
        norms = {group: self._norm(each) for group, each in grads.items()}
        rate = self.config.rate(self.step_number) if self.fixed_lr is None else self.fixed_lr
        for norm in norms.values():
            if not math.isfinite(norm):
                if scale is None or not scale.can_shrink():
                    raise NonFiniteError(self._describe_nonfinite(norm))
                scale.shrink()
                self.zero_grad()
                return {**scaled, "skipped_steps": 1.0, "lr": rate}
        for group, norm in norms.items():
            bound = self.config.clip_grad if group is None else group.clip_grad
            if 0 < bound < norm:
                torch._foreach_mul_(grads[group], bound / norm)
            if group is not None and group.renewed:
                self._renew(group)
        for each in inner.param_groups:
            own = each["miles_group"]
            each["lr"] = rate if own is None else own.rate(rate, self.step_number)
        if self._hosted:
            self._hosted.step(inner, hosted)
        else:
            inner.step()
        self.refresh()
        self.zero_grad()
        self.step_number += self.fixed_lr is None
        if scale is not None:
            scale.accept()
        further = {f"grad_norm/{g.name}": norm for g, norm in norms.items() if g is not None and grads[g]}
        return {"grad_norm": norms[None], "lr": rate, **further, **scaled}

    def _norm(self, grads: list[Tensor]) -> float:
        """Return the norm of these gradients over all processes."""
        own = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        return math.sqrt(float(self._parallel.square_norm(own.double().square())))

    @torch.no_grad()
    def _renew(self, group: OptimizerGroup) -> None:
        """Copy the model's values to the group's masters, and drop their optimizer state."""
        for name in self._names[group]:
            self.masters[name].copy_(local_shard(self.copies[name]).tensor)
            self._state.pop(self.masters[name], None)
        group.renewed = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters to the model's dtype and copy them to the model."""
        if names := list(self._separate):
            torch._foreach_copy_([local_shard(self.copies[n]).tensor for n in names], [self.masters[n] for n in names])

    def _describe_nonfinite(self, norm: float) -> str:
        bad = [n for n, m in self.masters.items() if m.grad is not None and not bool(m.grad.isfinite().all())]
        found = f"first in {bad[0]} ({len(bad)} of {len(self.masters)} parameters)" if bad else ""
        where = self._parallel.first_text(found) or "only in their sum"
        return (
            f"the gradient norm of optimiser step {self.step_number + 1} is {norm}, {where}; nothing was changed by "
            "this step: try a lower --lr, or look at this step's rewards and log-probs"
        )

    def memory(self) -> Iterator[Tensor]:
        """Yield tensors on the parameters' device other than the parameters; none is needed between two steps."""
        if self._offloaded:
            return
        for name, master in self.masters.items():
            state = self._state.get(master, {}).values()
            own = (v for v in state if isinstance(v, Tensor) and v.dim() and v.device == master.device)
            yield from (master, *own) if name in self._separate else own

    @property
    def _state(self) -> Any:
        """State of the optimizer by master."""
        return {} if self._inner is None else self._inner.state

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state and separate masters, named ``exp_avg.<parameter>`` etc.

        Raises:
            PluginError: the state of a sharded parameter is not sharded the same way.
        """
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if name in self._separate:
                out[f"master.{name}"] = master.detach()
            for key, value in self._state.get(master, {}).items():
                tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                if tensor.dim() and not _has_rows(tensor, master) and local_shard(self.copies[name]).sharded:
                    raise PluginError(
                        f"the optimizer {type(self._inner).__name__} keeps {key} of shape {list(tensor.shape)} for {name}, whose shard on "
                        f"this rank is {list(master.shape)}; with --sharding-strategy full_shard state must have the rows of the shard: as "
                        "many dimensions, the first of the same size"
                    )
                out[f"{key}.{name}"] = tensor
        return out

    def shard_of(self, name: str) -> LocalShard | None:
        """Return the local shard that corresponds to this name in ``tensors``; None for state without rows, such as the step count.

        Raises:
            KeyError: there is no such parameter.
        """
        key, _, parameter = name.partition(".")
        own, master = local_shard(self.copies[parameter]), self.masters[parameter]
        kept = self._state.get(master, {}).get(key)
        if key == "step" or (isinstance(kept, Tensor) and not _has_rows(kept, master)):
            return None
        return own

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], step_number: int) -> None:
        """Load the result of ``tensors`` after the model's weights were loaded. KeyError names a missing tensor."""
        self.reset()
        self.step_number = step_number
        with self.on_device():
            for name, master in self.masters.items():
                if name in self._separate:
                    master.copy_(tensors[f"master.{name}"])
                kept = {key: t for key, t in _select_state(tensors, name).items() if key != "master"}
                if kept:
                    self._state[master] = {key: self._place_state(value, master) for key, value in kept.items()}

    def _place_state(self, value: Tensor, master: Tensor) -> Tensor:
        """Copy a loaded state tensor to the device that the optimizer expects: step counts on the CPU unless it is fused."""
        if value.dim():
            return value.to(master.device, master.dtype if value.is_floating_point() else value.dtype, copy=True)
        fused = self._inner is not None and self._inner.defaults.get("fused")
        return value.to(master.device if fused else "cpu", copy=True)


def _select_state(tensors: dict[str, Tensor], parameter: str) -> dict[str, Tensor]:
    """Return key -> tensor of one parameter from the result of ``Optimizer.tensors``."""
    end = f".{parameter}"
    return {name[: -len(end)]: t for name, t in tensors.items() if name.endswith(end) and "." not in name[: -len(end)]}


def _has_rows(state: Tensor, master: Tensor) -> bool:
    """Whether a state tensor has the rows of its parameter, and can be divided among ranks like it."""
    return state.dim() == master.dim() and state.shape[:1] == master.shape[:1]


def _groups(masters: dict[OptimizerGroup | None, dict[str, Tensor]], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Make torch's parameter groups, with weight decay for matrices only."""
    groups: list[dict[str, Any]] = []
    for group, members in masters.items():
        decay = config.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        for matrices in (True, False):
            own = {n: m for n, m in members.items() if (m.dim() > 1) is matrices}
            groups.append(
                {
                    "params": [*own.values()],
                    "param_names": [*own],
                    "weight_decay": decay if matrices else 0.0,
                    "miles_group": group,
                }
            )
    return [group for group in groups if group["params"]]


def find_fault(made: object, groups: list[dict[str, Any]]) -> str:
    """Describe what an optimizer that a plugin made for ``groups`` lacks; "" if nothing."""
    lacking = [name for name in ("step", "param_groups", "state") if not hasattr(made, name)]
    if lacking:
        return f", which has no {', '.join(lacking)}; expected an object with the interface of torch.optim.Optimizer"
    theirs = {id(p) for group in made.param_groups for p in group["params"]}  # type: ignore[attr-defined]
    left_out = sum(id(p) not in theirs for group in groups for p in group["params"])
    if left_out or not all("miles_group" in group for group in made.param_groups):  # type: ignore[attr-defined]
        return f", which leaves out {left_out} parameters; make it from `groups`, with the entries of each group"
    return ""
