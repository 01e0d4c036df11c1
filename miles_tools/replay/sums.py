"""Checksums of gradients and weights, one per tensor, in every optimizer step, and of the weights in the engine after every sync.

Gradients are those that the optimizer reads (after clipping), weights those that it writes (the FP32 masters, if the model has another
dtype). All of them pass through ``torch.optim.Optimizer.step``, whose hooks every backend calls. A checksum reads the memory once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from miles_core.contracts.runtime import PolicyParts
from miles_core.plugin.marker import hookimpl
from miles_tools.replay.steps import write_sums
from miles_workers.transport.sent_weights import Checksums

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miles_core.contracts.run import Policy, Run
    from miles_core.contracts.trainer import OptimizerStep
    from miles_core.data.batch import Batch

#: Kinds of checksums of an optimizer step, in order.
BEFORE, GRADIENTS, AFTER = "before", "gradients", "after"


class Sums:
    """Hooks that record the checksums of each optimizer step of ``learn`` in the file ``sums.POLICY.RANK.json`` of the step."""

    def __init__(self) -> None:
        self._steps: dict[str, list[dict[str, dict[str, int]]]] = {}

    @hookimpl
    def on_batch(self, run: Run, policy: Policy, batch: Batch) -> None:
        self._steps[policy.name] = []

    @hookimpl
    def wrap_optimizer_step(self, run: Run, policy: Policy) -> Any:
        def wrap(inner: OptimizerStep) -> OptimizerStep:
            def optimizer_step() -> dict[str, float]:
                steps = self._steps.get(policy.name)
                if steps is None:  # a warm start, which is no step of the run
                    return inner()
                watch = _Watch(first=not steps)
                with watch:
                    metrics = inner()
                steps.append(watch.read())
                rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
                # CPU products of another number of threads round otherwise
                sums = {"threads": torch.get_num_threads(), "steps": steps}
                write_sums(run.directory, run.step + 1, f"sums.{policy.name}.{rank}", sums)
                return metrics

            return optimizer_step

        return wrap


class _Watch:
    """A context that computes the checksums of the optimizer steps inside it. first: also those of the weights before the step."""

    def __init__(self, first: bool) -> None:
        self._sums = {kind: Checksums() for kind in ((BEFORE,) if first else ()) + (GRADIENTS, AFTER)}
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def read(self) -> dict[str, dict[str, int]]:
        """Return kind -> tensor -> checksum."""
        return {kind: sums.read() for kind, sums in self._sums.items()}

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for name, parameter in _parameters(optimizer).items():
            if BEFORE in self._sums:
                self._sums[BEFORE].add(name, _local(parameter), stays=True)
            if parameter.grad is not None:
                self._sums[GRADIENTS].add(name, _local(parameter.grad), stays=True)
        for sums in self._sums.values():  # the step changes the memory
            sums.launch()

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for name, parameter in _parameters(optimizer).items():
            self._sums[AFTER].add(name, _local(parameter), stays=True)


def _parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters of an optimizer by name, in its order; without names, by their position."""
    found: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group {number}, parameter {i}" for i in range(len(group["params"]))]
        found |= dict(zip(names, group["params"], strict=True))
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, or the tensor."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def make_check(run: Run) -> Callable[[PolicyParts], Awaitable[Mapping[str, float]]] | None:
    """Make the check that records the weights of engines with the capability ``weight_checksums``; None without ``--record-steps``."""
    if not run.config.plugin("replay").record_steps:
        return None

    async def record(parts: PolicyParts) -> Mapping[str, float]:
        engine, policy = parts.serving, parts.policy
        if "weight_checksums" in engine.capabilities:
            held = await engine.weight_checksums(list(engine.weight_dtypes()))
            sums = {"workers": {worker: dict(found) for worker, found in held.items()}}
            write_sums(run.directory, max(policy.version, 0), f"engine.{policy.name}", sums)
        return {}

    return record
