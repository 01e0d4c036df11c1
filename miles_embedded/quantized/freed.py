"""Weights of an engine that are stored only as the codes of a native product.

A native product reads codes. The decoded weight of its layer is needed only by emulation, a backward pass, inputs of another dtype and
exports. An engine frees it when the codes have arrived, so a quantised layer takes one byte per weight instead of three. The cases above
decode the codes again for one call, to the values that an update would have written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from miles_embedded.model.storage import codes_of, is_constant, put_codes, put_values


class FreedWeight:
    """One parameter of a native layer, which may be stored as codes only (``storage.Codes``).

    Args:
        module: the layer.
        attribute: name of the parameter in ``module``.
        write: decodes the codes to a tensor with the parameter's shape, strides and dtype; returns False if there are no codes.
        stored: yields the tensors of the codes.
    """

    def __init__(
        self,
        module: nn.Module,
        attribute: str,
        write: Callable[[Tensor], bool],
        stored: Callable[[], Iterable[Tensor]],
    ) -> None:
        self.module, self.attribute = module, attribute
        self._write, self._stored = write, stored

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, without a storage if it is freed."""
        found = self.module._parameters[self.attribute]
        assert found is not None
        return found

    @property
    def freed(self) -> bool:
        """Whether the parameter has no storage."""
        return codes_of(self.parameter) is self

    def free(self) -> None:
        """Free the parameter's storage. Constant parameters, which updates do not contain, keep theirs."""
        parameter = self.parameter
        if codes_of(parameter) is None and not is_constant(parameter):
            put_codes(parameter, self, parameter.device)

    @torch.no_grad()
    def restore(self) -> None:
        """Allocate the storage again, with the decoded values if there are codes."""
        if self.freed:
            values = self._empty()
            self._write(values)
            put_values(self.parameter, values)

    @torch.no_grad()
    def values(self) -> Tensor:
        """Decode; see ``storage.Codes``."""
        values = self._empty()
        if not self._write(values):
            raise RuntimeError(f"{self.attribute} has neither values nor codes until the next weight update")
        return values

    def tensors(self) -> Iterator[Tensor]:
        """Yield codes and scales."""
        yield from self._stored()

    @contextmanager
    def decoded(self) -> Iterator[None]:
        """Let the module read decoded values inside this context, if the parameter is freed."""
        if not self.freed:
            yield
            return
        self.module.__dict__[self.attribute] = self.values()
        try:
            yield
        finally:
            self.module.__dict__.pop(self.attribute, None)

    def _empty(self) -> Tensor:
        like = self.parameter
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


class DecodedCalls:
    """Forward hooks of one module, in which it reads decoded values of its freed weights.

    Args:
        weights: the module's weights.
        needs: (arguments of the forward) -> whether the call reads values instead of codes.
    """

    def __init__(self, weights: Iterable[FreedWeight], needs: Callable[[tuple], bool]) -> None:
        self.weights, self.needs = tuple(weights), needs
        self._running: list[ExitStack] = []

    def attach(self, module: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Register the hooks; returns their handles."""
        return [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: tuple) -> None:
        if any(weight.freed for weight in self.weights) and self.needs(args):
            stack = ExitStack()
            for weight in self.weights:
                stack.enter_context(weight.decoded())
            self._running.append(stack)

    def _leave(self, module: nn.Module, args: tuple, output: object) -> None:
        while self._running:
            self._running.pop().close()
