"""Recomputation of activations in the backward pass (Chen et al. 2016, arXiv 1604.06174): each decoder layer keeps its input only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from miles_embedded.model.call import active_call, enter_call
from miles_embedded.model.parts import decoder_layers


def recompute_layers(model: nn.Module, sharded: bool = False, observed: bool = False) -> None:
    """Make every decoder layer keep its input only, and recompute its activations in the backward pass.

    Args:
        model: a model of Transformers.
        sharded: processes share the parameters, so a layer's forward and backward pass communicate; use PyTorch's checkpoint.
        observed: the loss reads tensors from inside the layers; use PyTorch's checkpoint.
    """
    named: Any = model
    enable = getattr(named, "activation_checkpointing_enable", None) or named.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # Transformers recomputes layers only in training mode. Only the layers themselves are set to it: their children, including
    # dropout, stay in evaluation mode, because a policy's log-probs must not be random. Some layers drop values without a module for it.
    for layer in decoder_layers(model):
        layer.training = True
        for name in [name for name, value in vars(layer).items() if "dropout" in name and isinstance(value, float)]:
            setattr(layer, name, 0.0)
        if hasattr(layer, _FUNCTION):
            plain = not sharded and not observed
            setattr(layer, _FUNCTION, partial(_enter_and_run, recompute if plain else getattr(layer, _FUNCTION)))


#: Attribute of Transformers' layers: called with the layer's forward and its positional arguments.
_FUNCTION = "_gradient_checkpointing_func"


def _enter_and_run(function: Callable[..., Any], forward: partial[Any], *args: Any) -> Any:
    """Call ``function`` with a forward that first makes the layer's call the active one: not every model passes it on to its layers (Mamba),
    and not every layer to its modules (Jamba)."""
    call = active_call()

    def run(*args: Any, **kwargs: Any) -> Any:
        enter_call(kwargs.get("call", call))
        return forward.func(*args, **kwargs)

    return function(partial(run, *forward.args, **forward.keywords), *args)


def recompute(forward: partial[Any], *args: Any) -> Any:
    """Return ``forward(*args)``, a tensor or a tuple, and compute it again in the backward pass.

    PyTorch's checkpoint without reentrant backward calls two Python functions for every tensor that autograd keeps, some 50 in a layer. For
    small micro-batches on a GPU this takes the host longer than the layer. Here autograd keeps one node per layer, whose backward pass
    runs the layer again; layers draw no random numbers. Gradients of tensors in keyword arguments would be lost, so calls with such
    tensors use PyTorch's.

    Raises:
        RuntimeError: in the backward pass, if the loss reads a tensor from inside the layer other than its outputs.
    """
    if any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(forward.keywords)):
        return checkpoint(forward, *args, use_reentrant=False)
    anchor = torch.empty(0, requires_grad=True)  # the layer's own parameters need a gradient even if no argument does
    return _Recomputed.apply(anchor, forward, *args)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, forward: partial[Any], *args: Any) -> Any:
        ctx.forward, ctx.others = forward, [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg if isinstance(arg, Tensor) else None for arg in args))
        # with gradients, as the second time, because some layers choose their kernels by this mode
        inputs = _detach(args, ctx.needs_input_grad[2:])
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(_refuse)
        outputs = _run(forward, inputs)
        found = tuple(out.detach() if isinstance(out, Tensor) else out for out in _as_tuple(outputs))
        return found if isinstance(outputs, tuple) else found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        args = _detach([other if saved is None else saved for saved, other in pairs], ctx.needs_input_grad[2:])
        outputs = zip(_as_tuple(_run(ctx.forward, args)), grads, strict=True)
        used = [
            (out, grad) for out, grad in outputs if isinstance(out, Tensor) and out.requires_grad and grad is not None
        ]
        if used:  # not in a layer that is frozen, and so is everything below it
            torch.autograd.backward([out for out, _ in used], [grad for _, grad in used])
        return None, None, *(arg.grad if isinstance(arg, Tensor) else None for arg in args)


def _refuse(grad: Tensor) -> None:
    raise RuntimeError(
        "the loss reads a tensor that was kept from inside a decoder layer, but the layer's activations are recomputed: its gradient would "
        "not reach the layers below; detach the tensor, or run without --recompute-activations"
    )


@torch.enable_grad()
def _run(forward: partial[Any], args: Sequence[Any]) -> Any:
    return forward(*args)


def _detach(args: Sequence[Any], needed: Sequence[bool]) -> list[Any]:
    return [
        arg.detach().requires_grad_(need) if isinstance(arg, Tensor) else arg
        for arg, need in zip(args, needed, strict=True)
    ]


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
