"""Adapters and their computation inside a model.

An adapter of a linear layer is two matrices, A [rank, in] and B [out, rank]: the layer computes ``W x + scale B (A x)`` (Hu et al., arXiv
2106.09685, section 4.1). Joined experts have a pair per expert, stored as ``peft`` stores them: A [experts * rank, in], and B
[out, rank * experts] with the expert as the fastest index. Experts compute with ``W + scale B A``, as in ``peft``.

Adapters are children of the modules that they change, which keep their class, parameters and names: number formats, native products and
exports work as without adapters. ``peft`` would put each layer into another module and rename its weight.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from miles_embedded import active_context
from miles_lora import LoraOptions
from miles_lora.targets import Target

#: Name of the child that holds the adapters of a module.
CHILD = "lora"


def scale_of(options: LoraOptions) -> float:
    """Return the factor on B A."""
    return options.alpha / (math.sqrt(options.rank) if options.use_rslora else options.rank)


class Adapter(nn.Module):
    """The two matrices of one adapter, in the dtype and on the device of the weight.

    Args:
        weight: the weight [out, in], or [experts, out, in] ([experts, in, out] if ``transposed``); only its shape, dtype and device count.
        options: rank, scale and dropout.
        transposed: layout of joined experts.
    """

    def __init__(self, weight: Tensor, options: LoraOptions, transposed: bool = False) -> None:
        super().__init__()
        self.experts = weight.shape[0] if weight.ndim == 3 else 0
        outer, inner = weight.shape[-2:] if not (transposed and self.experts) else (weight.shape[-1], weight.shape[-2])
        self.rank, self.transposed = options.rank, transposed
        self.scale, self.p = scale_of(options), options.dropout
        rows = self.rank * max(self.experts, 1)
        self.lora_A = nn.Parameter(weight.new_zeros(rows, inner))
        self.lora_B = nn.Parameter(weight.new_zeros(outer, rows))

    @torch.no_grad()
    def reset(self, seed: str, source: str) -> None:
        """Draw A from the distribution that ``peft`` uses (Kaiming uniform with a = sqrt(5)); B is 0, so the adapter has no effect.

        seed, source: the seed of the policy and the name of the parameter, which determine A."""
        bound = 1 / math.sqrt(self.lora_A.shape[1])
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{source}".encode()))
        self.lora_A.copy_((torch.rand(self.lora_A.shape, generator=generator) * 2 - 1) * bound)
        self.lora_B.zero_()

    def forward(self, base: Tensor, x: Tensor | None = None) -> Tensor:
        """Add the adapter to ``base``, which may be overwritten if it is the output of a layer.

        Args:
            base: output [..., out] of a linear layer, or the weight of joined experts.
            x: input [..., in] of the linear layer; None for experts.

        Returns:
            ``base + scale B (A x)``, or ``base + scale B A``.
        """
        if x is None:
            left, right = split_experts(self.lora_A, self.lora_B, self.experts)
            if self.transposed:
                left, right = right.transpose(1, 2), left.transpose(1, 2)
            return torch.baddbmm(base, left, right, alpha=self.scale)
        ctx = active_context()
        if self.p and ctx is not None and ctx.kind == "train":
            x = dropout(x, self.p, training=True)
        return _add_product(base, linear(x, self.lora_A), self.lora_B.t(), self.scale)


def _add_product(base: Tensor, inner: Tensor, matrix: Tensor, scale: float) -> Tensor:
    """Return ``base + scale inner matrix``, in the memory of ``base``: one kernel instead of two that read or write all of it.

    With gradients only for [1, rows, out], the shape of packed rows, and not for a view: autograd copies the gradient of a tensor that was changed
    through a view, and refuses a change of some.
    """
    if not torch.is_grad_enabled():
        rows = base.flatten(0, -2)
        return rows.addmm_(inner.flatten(0, -2), matrix, alpha=scale).view(base.shape)
    if base.dim() == 3 and len(base) == 1 and not base._is_view():
        return base.baddbmm_(inner, matrix.unsqueeze(0), alpha=scale)
    return torch.add(base, inner @ matrix, alpha=scale)


def split_experts(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return B [experts, out, rank] and A [experts, rank, in] of each expert, in this order."""
    return b.reshape(len(b), -1, experts).permute(2, 0, 1), a.reshape(experts, -1, a.shape[1])


def delta_of(adapter: Adapter, a: Tensor, b: Tensor) -> Tensor:
    """Return ``scale B A`` in float32, in the shape of the weight, from the complete matrices of an adapter that ranks may divide."""
    a, b = a.float(), b.float()
    if not adapter.experts:
        return adapter.scale * (b @ a)
    left, right = split_experts(a, b, adapter.experts)
    delta = adapter.scale * (left @ right)
    return delta.transpose(1, 2) if adapter.transposed else delta


def squared_norm(adapter: Adapter, a: Tensor, b: Tensor) -> Tensor:
    """Return the squared Frobenius norm of ``delta_of``, without computing it."""
    left, right = split_experts(a.float(), b.float(), max(adapter.experts, 1))
    gram = (left.transpose(1, 2) @ left) * (right @ right.transpose(1, 2))
    return adapter.scale**2 * gram.sum()


def attach(targets: list[Target], options: LoraOptions, seed: str, raw_inputs: bool) -> dict[str, Adapter]:
    """Add adapters to the modules of ``targets``.

    Args:
        targets: weights of one model.
        options: rank, scale and dropout.
        seed: determines the initial values, together with the name of each target.
        raw_inputs: a number format will round the inputs of linear layers; adapters then read the inputs before they are rounded.

    Returns:
        name of the adapted parameter -> adapter.
    """
    found: dict[str, Adapter] = {}
    for target in targets:
        weight = target.module._parameters[target.attribute]
        assert weight is not None
        adapter = Adapter(weight, options, bool(getattr(target.module, "is_transposed", False)))
        adapter.reset(seed, target.source)
        found[target.source] = adapter
        if target.is_joined:
            _attach_experts(target, adapter)
        else:
            target.module.add_module(CHILD, adapter)
            hooks = _RawInput() if raw_inputs else None
            if hooks is not None:
                target.module.register_forward_pre_hook(hooks.keep)
            target.module.register_forward_hook(_add_output if hooks is None else hooks.add)
    return found


def _attach_experts(target: Target, adapter: Adapter) -> None:
    group = target.module._modules.get(CHILD)
    if group is None:
        group = nn.ModuleDict()
        target.module.add_module(CHILD, group)
        target.module.register_forward_pre_hook(_put_sums)
        target.module.register_forward_hook(_remove_sums, always_call=True)
    assert isinstance(group, nn.ModuleDict)
    group[target.attribute] = adapter


def _add_output(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    return _add_adapter(layer, output, args[0])


def _add_adapter(layer: nn.Module, output: Tensor, x: Tensor) -> Tensor:
    adapter = layer._modules[CHILD]
    assert adapter is not None
    found: Tensor = adapter(output, x)
    return found


def _put_sums(experts: nn.Module, args: Any) -> None:
    """Hide the weights by their sums with the adapters while the module runs."""
    for attribute, adapter in _adapters_in(experts):
        experts.__dict__[attribute] = adapter(getattr(experts, attribute))


def _remove_sums(experts: nn.Module, args: Any, output: Any) -> None:
    for attribute, _ in _adapters_in(experts):
        experts.__dict__.pop(attribute, None)


def _adapters_in(experts: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    group = experts._modules[CHILD]
    assert isinstance(group, nn.ModuleDict)
    return iter(group.items())


class _RawInput:
    """Hooks of a linear layer whose input another hook rounds: they keep the input from before for the adapter."""

    def __init__(self) -> None:
        self._kept = threading.local()

    def keep(self, layer: nn.Module, args: Any) -> None:
        self._kept.x = args[0]

    def add(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        x, self._kept.x = self._kept.x, None
        return _add_adapter(layer, output, x)
