"""The trainer's fake-quantised forward: weights (and activations, if the format quantises them) in low precision, gradients and optimizer
in full precision.

A layer reads ``dequantise(quantise(weight))`` in the model's dtype instead of its weight. An engine with the same format computes with
the same values, from the same codes, because both encode one checkpoint tensor at a time with ``Codec`` (each expert and gate and up
separately, however the module joins them). The backward pass is straight-through: the gradient of the quantised weight is the gradient
of the weight.

A weight is quantised once after each change, not once per micro-batch. The first use after an optimizer step quantises all weights that
were in use before the step, because every check for NaN makes the GPU wait for the host. If parameters are sharded, a weight is quantised at
every use, because no process may keep all of it. The parameter itself is never modified: outside the module's forward, all code (optimizer, export,
checkpoints, other hooks) reads the plain parameter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from miles_core.data.weight_unit import WeightUnit
from miles_core.precision.codec import COPY, Codec
from miles_core.precision.product import Product
from miles_embedded.model.gradient_sum import GRADIENT_SUM
from miles_embedded.model.storage import codes_of, device_of_hosted, is_sharded
from miles_embedded.model.views import Row, View, find_rows, group_coupled, views
from miles_embedded.quantized.activation import RoundedInputs, encoded_views
from miles_formats.finite import Finite, Stack

#: Elements of weights that are quantised together after an optimizer step; their codes are in memory at the same time.
_TOGETHER = 1 << 29


@dataclass(frozen=True, eq=False)
class _Group:
    """Parameters that are quantised together because a unit spans them; ``units`` are their checkpoint tensors."""

    sources: tuple[str, ...]
    units: tuple[tuple[View, ...], ...]


class FakeQuantizer:
    """Quantised values of one model, provided to its layers.

    A value is computed on first use, and again after any torch optimizer stepped or the parameter was replaced or written in place.
    Writes through ``.data``, or by an optimizer that is not a ``torch.optim.Optimizer``, are not detected: call ``forget`` afterwards.

    Args:
        model: prepared by ``miles_embedded.model.load``.
        codec: the trainer's number format and selector.
        product: native product for linear layers; None emulates it.
        rounds_gradients, native_experts: see ``RoundedInputs``.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: Codec,
        product: Product | None = None,
        rounds_gradients: bool = False,
        native_experts: bool = True,
    ) -> None:
        if codec.format is None:
            raise ValueError("a fake-quantised forward needs a number format")
        _count_steps()
        self.model, self.codec, self.format = model, codec, codec.format
        encoded = encoded_views(model, codec)
        codec.check({view.name: view.size for view in views(model)})
        parameters = dict(model.named_parameters())
        own = [
            v for v in encoded if codes_of(parameters.get(v.source)) is None
        ]  # the others have this format's values already
        self._groups = _groups(list(group_coupled(own)), codec)
        self._owners = {s: _owner(model, s) for s in self._groups}
        self.inputs = RoundedInputs(model, codec, product, False, rounds_gradients, native_experts)
        self._values: dict[str, Tensor] = {}
        self._seen: dict[str, Any] = {}
        self._rows_of: dict[_Group, tuple[Row, ...]] = {}
        self._differentiable = _Differentiable()

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the parameters that are quantised at least in part."""
        return tuple(self._groups)

    @property
    def enabled(self) -> bool:
        """Whether quantisation is active; otherwise the model computes with plain weights and activations."""
        return self.inputs.enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self.inputs.enabled = on

    @cached_property
    def keeps(self) -> bool:
        """Whether values are kept until the parameter changes, instead of until its module has run. Evaluated in the first forward."""
        return not is_sharded(self.model)

    def forget(self) -> None:
        """Quantise everything again at the next forward."""
        self._seen.clear()

    def drop(self, source: str) -> None:
        """Drop the quantised value of one parameter."""
        self._seen.pop(source, None)
        self._values.pop(source, None)
        self._differentiable.pop(source, None)
        for unit in self._groups[source].units:
            self.inputs.drop(view.name for view in unit if view.source == source)

    def parameter(self, source: str) -> Tensor:
        """Return the plain parameter."""
        module, attribute = self._owners[source]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    def value(self, source: str) -> Tensor:
        """Return the fake-quantised values, in the parameter's shape and dtype, without gradient."""
        group = self._groups[source]
        if self._is_stale(group):
            self._quantize([group, *(self._stale_with(group) if self.keeps else ())])
        return self._values[source]

    def differentiable(self, source: str, parameter: Tensor) -> Tensor:
        """Return ``value`` with the straight-through gradient of ``parameter``: the same tensor until the value changes, whose graph any number of
        backward passes may use, because it saves nothing."""
        value = self.value(source)
        known = self._differentiable.get(source)
        if known is None or known[0] is not parameter or known[1] is not value:
            known = self._differentiable[source] = parameter, value, _StraightThrough.apply(parameter, value)
        # where a kernel may add the gradient that would pass to the parameter
        setattr(known[2], GRADIENT_SUM, getattr(parameter, GRADIENT_SUM, None))
        return known[2]

    @cached_property
    def _partial(self) -> set[str]:
        """The parameters that are quantised in part only."""
        sizes = Counter[str]()
        for group in dict.fromkeys(self._groups.values()):
            for view in chain.from_iterable(group.units):
                sizes[view.source] += math.prod(view.size)
        return {source for source, size in sizes.items() if size != self.parameter(source).numel()}

    def _rows(self, group: _Group) -> tuple[Row, ...]:
        """Return the tensors of a group in runs that one launch quantises; () if the format leaves one of them alone or refuses it, or if a native
        product needs their codes."""
        if group not in self._rows_of:
            members = list(chain.from_iterable(group.units))
            native = any(view.name in self.inputs.layers or view.name in self.inputs.experts for view in members)
            whole = not native and all(
                self.codec.quantises(view.name, view.size) and self.format.refuse((view.size[0], view.size[1])) is None
                for view in members
            )
            of_source = [[view for view in members if view.source == source] for source in group.sources]
            self._rows_of[group] = tuple(row for own in of_source for row in find_rows(own)) if whole else ()
        return self._rows_of[group]

    def _state(self, group: _Group) -> tuple[tuple[int, ...], ...]:
        return tuple([_state(self.parameter(s)) for s in group.sources])

    def _is_stale(self, group: _Group) -> bool:
        return self._seen.get(group.sources[0]) != self._state(group)

    def _stale_with(self, first: _Group) -> Iterator[_Group]:
        """Yield further groups whose values have to be computed again, on the device of ``first`` and up to ``_TOGETHER`` elements."""
        device, count = self.parameter(first.sources[0]).device, 0
        for group in dict.fromkeys(self._groups.values()):
            own = [self.parameter(source) for source in group.sources]
            used = group is not first and all(source in self._values for source in group.sources)
            if used and all(p.device == device and device_of_hosted(p) is None for p in own) and self._is_stale(group):
                count += sum(p.numel() for p in own)
                if count > _TOGETHER:
                    return
                yield group

    @torch.no_grad()
    def _quantize(self, groups: list[_Group]) -> None:
        states = {s: state for group in groups for state in (self._state(group),) for s in group.sources}
        plain = {s: self.parameter(s).detach() for s in states}
        for source in states:  # their memory is free for the new ones
            for kept in (self._values, self._differentiable, self._seen):
                kept.pop(source, None)
        values = {s: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for s, t in plain.items()}
        for source in self._partial & states.keys():
            values[source].copy_(plain[source])  # parts of a joined parameter that are not quantised keep their values
        stacks = {group: self._quantize_stacked(group, plain, values) for group in groups}
        finite = Finite(all_stay=True)
        finite.add_stacks([*chain.from_iterable(stacks.values())])
        finite.look()
        self._quantize_each([group for group in groups if not stacks[group]], plain, values)
        self._values.update(values)
        self._seen.update(states)

    def _quantize_stacked(self, group: _Group, plain: dict[str, Tensor], values: dict[str, Tensor]) -> list[Stack]:
        """Quantise a group in a launch for equally spaced tensors, without keeping codes; returns these tensors for ``Finite``, or [] if the format
        does not do that."""
        stacks: list[Stack] = []
        for row in self._rows(group):
            weights, out = (tensors[row.first.source] for tensors in (plain, values))
            weights = row.stack(weights)
            shows = self.format.fake_quantize_stacked(weights, row.stack(out)) if weights.dtype == COPY else None
            if shows is None:
                return []
            stacks.append((row.names, weights, shows))
        return stacks

    def _quantize_each(self, groups: list[_Group], plain: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        """Quantise groups tensor by tensor, and give native products their codes."""
        inside = [unit for group in groups for unit in group.units]
        view_of = {view.name: view for unit in inside for view in unit}
        units = (WeightUnit({v.name: v.of(plain[v.source]) for v in unit}, lasting=True) for unit in inside)
        encoded = list(self.codec.encode(units))  # many small experts take a few launches and one check for NaN
        for each in encoded:
            self.inputs.take(each)
        views_of = [view_of[each.name] for each in encoded]
        self.codec.decode_all(encoded, [view.of(values[view.source]) for view in views_of])


class _StraightThrough(torch.autograd.Function):
    """Returns ``quantized``, with the gradient passed to ``weight``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, quantized: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # None: a kernel added the gradient to its ``GradientSum``
        return quantized.view_as(quantized)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient, None


class _Differentiable(dict[str, tuple[Tensor, Tensor, Tensor]]):
    """Parameter, value and result of ``_StraightThrough`` by source. A copy is empty, because tensors of a graph cannot be copied."""

    def __reduce__(self) -> tuple[type[_Differentiable], tuple[()]]:
        return _Differentiable, ()


class _Shadow:
    """Forward hooks of one module, which set an attribute that hides the parameter of the same name while the module runs.

    Only the instance's dictionary changes, which attribute access reads before parameters. Recomputation runs submodules with their
    hooks, so it reads the same values.
    """

    def __init__(self, quantizer: FakeQuantizer, sources: dict[str, str]) -> None:
        self.quantizer, self.sources = quantizer, sources

    def enter(self, module: nn.Module, args: Any) -> None:
        if not self.quantizer.enabled:
            return
        for attribute, source in self.sources.items():
            parameter = module._parameters[attribute]
            if torch.is_grad_enabled() and parameter is not None and parameter.requires_grad:
                value = self.quantizer.differentiable(source, parameter)
            else:
                value = self.quantizer.value(source)
            module.__dict__[attribute] = value

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for attribute, source in self.sources.items():
            if module.__dict__.pop(attribute, None) is not None and not self.quantizer.keeps:
                self.quantizer.drop(source)


def install(
    model: nn.Module,
    codec: Codec,
    product: Product | None = None,
    rounds_gradients: bool = False,
    native_experts: bool = True,
) -> FakeQuantizer:
    """Fake-quantise ``model`` in the codec's format, with straight-through gradients.

    Args:
        model: prepared by ``miles_embedded.model.load``, not yet wrapped for checkpointing, compilation or sharding.
        codec: the trainer's codec, which must have a format.
        product, rounds_gradients, native_experts: see ``FakeQuantizer``.

    Raises:
        ConfigError: a selector matches nothing, or the format cannot store a selected weight.
        MilesError: (in a forward) a weight is NaN or Inf; names the weight.
    """
    quantizer = FakeQuantizer(model, codec, product, rounds_gradients, native_experts)
    by_module: dict[nn.Module, dict[str, str]] = {}
    for source in quantizer.sources:
        module, attribute = quantizer._owners[source]
        by_module.setdefault(module, {})[attribute] = source
    for module, sources in by_module.items():
        shadow = _Shadow(quantizer, sources)
        module.register_forward_pre_hook(shadow.enter)
        module.register_forward_hook(shadow.leave, always_call=True)
    return quantizer


def _groups(units: list[list[View]], codec: Codec) -> dict[str, _Group]:
    """Return source -> group for every parameter with a quantised tensor."""
    chosen = [u for u in units if any(codec.quantises(v.name, v.size) for v in u)]
    label: dict[str, str] = {}
    for unit in chosen:
        sources = [v.source for v in unit]
        roots = {label.setdefault(s, s) for s in sources}
        first = label[sources[0]]
        label.update({s: first for s, root in label.items() if root in roots})
    groups: dict[str, _Group] = {}
    for root in dict.fromkeys(label.values()):
        members = tuple(s for s, r in label.items() if r == root)
        inside = tuple(tuple(u) for u in chosen if u[0].source in members)
        groups.update(dict.fromkeys(members, _Group(members, inside)))
    return {s: groups[s] for s in label}


def _owner(model: nn.Module, source: str) -> tuple[nn.Module, str]:
    path, _, attribute = source.rpartition(".")
    return model.get_submodule(path), attribute


_steps = 0


@cache
def _count_steps() -> None:
    """Count the steps of all optimizers from now on: a fused optimizer writes parameters without incrementing their version counters."""

    def count(*_: Any) -> None:
        global _steps
        _steps += 1

    register_optimizer_step_post_hook(count)


def _state(parameter: Tensor) -> tuple[int, ...]:
    """Return a key that changes whenever the parameter's values may have changed."""
    return _steps, parameter._version, parameter.data_ptr()
