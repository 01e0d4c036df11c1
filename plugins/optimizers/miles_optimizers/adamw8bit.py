"""AdamW whose two moments have 8 bits per element (Dettmers et al., arXiv 2110.02861; torchao's ``AdamW8bit``).

A moment is stored as codes of a dynamic 8-bit data type and one FP32 scale per block of up to 256 elements. Blocks do not cross the rows
of a parameter, so that codes and scales of a sharded parameter are divided among ranks like its rows. Vectors, and matrices whose rows
cannot be divided into blocks of at least 32 elements, have FP32 moments.

torchao compiles the step of each shape, which fuses decoding, update and encoding. On a CPU the same step runs without compilation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from miles_core.plugin import ConfigError, Policy, Run
from miles_core.trainer import OptimizerConfig

try:
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit
except ImportError as error:
    raise ConfigError(
        f"--optimizer adamw8bit: torchao cannot be imported ({error}); pip install 'torchao>=0.17', or use --optimizer adamw-offload"
    ) from error

#: Largest and smallest number of elements with one scale.
BLOCK, SMALLEST = 256, 32
#: Name of a moment -> whether it has a sign.
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}


def make_optimizer(run: Run, policy: Policy, groups: Sequence[dict[str, Any]]) -> EightBitAdamW:
    """Provider of ``--optimizer adamw8bit``."""

    def make_adamw(rest: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = run.hooks.make("optimizer", "adamw", run=run, policy=policy, groups=rest)
        return made

    return EightBitAdamW(groups, make_adamw, OptimizerConfig.of(run.config_of(policy)))


def block_of(parameter: Tensor) -> int | None:
    """Return the block size of a parameter's moments: the largest power of two up to 256 that divides its rows; None for FP32 moments."""
    if parameter.dim() < 2 or not parameter.is_contiguous():
        return None
    block = math.gcd(parameter.shape[-1], BLOCK)
    return block if block >= SMALLEST else None


class EightBitAdamW:
    """An optimizer with torch's interface. The state of a parameter is plain tensors, ``exp_avg_codes`` (uint8, the parameter's shape) and
    ``exp_avg_scale`` (FP32, its rows), and the same for ``exp_avg_sq``.

    Args:
        groups: torch's parameter groups with their weight decay.
        make_adamw: makes AdamW with FP32 moments for parameter groups.
        config: settings of AdamW.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        make_adamw: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        config: OptimizerConfig,
    ) -> None:
        def divide(eight_bit: bool) -> list[dict[str, Any]]:
            found = []
            for group in groups:
                pairs = zip(group["param_names"], group["params"], strict=True)
                own = [(n, p) for n, p in pairs if (block_of(p) is not None) is eight_bit]
                found.append({**group, "param_names": [n for n, _ in own], "params": [p for _, p in own]})
            return [group for group in found if group["params"]]

        self._maps: dict[tuple[bool, torch.device], Tensor] = {}
        self._groups, rest = divide(True), divide(False)
        self._small = make_adamw(rest) if rest else None
        self._eight: Any = None
        if self._groups:
            parts = [{"params": [p for p in g["params"] if p.numel()]} for g in self._groups]
            self._eight = AdamW8bit(parts, lr=config.lr, betas=config.betas, eps=config.eps)
        self.state: Any = defaultdict(dict) if self._small is None else self._small.state
        self.param_groups = [*self._groups, *(() if self._small is None else self._small.param_groups)]
        self.defaults = {} if self._small is None else self._small.defaults

    def step(self) -> None:
        """Step all parameters with a gradient."""
        if self._eight is not None:
            for group, own in zip(self._groups, self._eight.param_groups, strict=True):
                own["lr"].fill_(group["lr"])
                own["weight_decay"] = group["weight_decay"]
                for parameter in own["params"]:
                    if parameter.grad is not None:
                        self._eight.state[parameter] = self._moments(parameter)
            with _eagerly(self._groups[0]["params"][0]):
                self._eight.step()
            self._eight.state.clear()
        if self._small is not None:
            self._small.step()

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter in torchao's form, which shares the memory of ``state``."""
        state = self.state[parameter]
        block = block_of(parameter)
        assert block is not None
        if "step" not in state:
            scales = (*parameter.shape[:-1], parameter.shape[-1] // block)
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
                state[f"{name}_scale"] = torch.zeros(scales, device=parameter.device)
        state["step"] = state["step"].cpu()
        found = {"step": state["step"]}
        for name, signed in MOMENTS.items():
            codes, scale = state[f"{name}_codes"], state[f"{name}_scale"].view(-1)
            found[name] = OptimState8bit(codes, scale, self._values(signed, codes.device), signed, dtype=torch.float32)
        return found

    def _values(self, signed: bool, device: torch.device) -> Tensor:
        """Return the numbers that the 256 codes stand for, [256] FP32."""
        if (signed, device) not in self._maps:
            self._maps[signed, device] = OptimState8bit.zeros((BLOCK,), signed, BLOCK, device).qmap
        return self._maps[signed, device]


def _eagerly(parameter: Tensor) -> AbstractContextManager[Any]:
    """Run torchao's step without compilation on a CPU, which may have no compiler."""
    return torch.compiler.set_stance("force_eager") if parameter.device.type == "cpu" else nullcontext()
