"""Computes each residual addition of a decoder layer together with the norm that reads the sum. A decoder layer like Llama's adds the
results of its attention and of its MLP to the residual stream. A norm reads each sum: the layer's second
one, then the first one of the next layer, or the model's last one. One kernel computes sum and norm; the norm's module then returns this
result if it receives the same sum. Hooks on all modules run as before.

The operation ``norm`` of the model's table has a method ``of_sum`` for this. A layer's forward is replaced only if its class computes the
same results. A layer that is recomputed in the backward pass runs the code of its class, which recomputes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.model.parts import put_forward
from miles_embedded.model.row_readers import epilogue_of

#: (x, other, weight, eps, epilogue) -> ``x + other`` and its norm.
OfSum = Callable[..., tuple[Tensor, Tensor]]

_FIRST_NORM, _SECOND_NORM = "input_layernorm", "post_attention_layernorm"
_PARTS = (_FIRST_NORM, "self_attn", _SECOND_NORM, "mlp")
#: Attribute of a layer: the norm that reads its result.
_NEXT = "miles_next_norm"
#: Attributes of a norm: how to compute it with the sum that it reads; that sum, its version and its norm.
_OF_SUM, _COMPUTED = "miles_of_sum", "miles_computed"


def replace_sums(layers: nn.ModuleList, last: nn.Module | None) -> int:
    """Make decoder layers compute their sums with the norms that read them if these support it (``set_of_sum``), otherwise with their
    classes' code.

    Args:
        layers: the layers in order.
        last: the norm after the last layer.

    Returns:
        the number of layers whose sums were replaced.
    """
    count = 0
    next_norms = [*(getattr(layer, _FIRST_NORM, None) for layer in layers[1:]), last]
    for layer, next_norm in zip(layers, next_norms, strict=True):
        if _NEXT in layer.__dict__:
            del layer.__dict__[_NEXT]
            layer.__dict__.pop("forward", None)
        norms = next_norm, getattr(layer, _SECOND_NORM, None)  # they read the layer's two sums
        if any(_OF_SUM in vars(norm) for norm in norms if norm is not None) and _is_standard(layer):
            layer.__dict__[_NEXT] = next_norm
            put_forward(layer, _forward)
            count += 1
    return count


def set_of_sum(norm: Any, of_sum: OfSum | None, eps: float) -> None:
    """Let sums that this norm reads be computed by ``of_sum``; for None, by torch."""
    norm.__dict__.pop(_OF_SUM, None)
    if of_sum is not None:
        norm.__dict__[_OF_SUM] = of_sum, eps


def take_computed(norm: Any, x: Tensor) -> Tensor | None:
    """Return and remove the norm of this sum; None if it was not computed with the sum, or the sum has changed since."""
    computed = norm.__dict__.pop(_COMPUTED, None)
    if computed is None or computed[0] is not x or x._version != computed[1]:
        return None
    found: Tensor = computed[2]
    return found


def _forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """[..., dim] -> [..., dim], as the layer's class; its defaults may not be those of its attention."""
    recomputed = torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False) and layer.training
    if args or "attention_mask" not in kwargs or recomputed:
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
    hidden_states = _add(layer.post_attention_layernorm, hidden_states, attended)
    out = layer.mlp(layer.post_attention_layernorm(hidden_states))
    return _add(layer.__dict__[_NEXT], hidden_states, out[0] if isinstance(out, tuple) else out)


def _add(norm: Any, x: Tensor, other: Tensor) -> Tensor:
    """Return ``x + other``, which ``norm`` will read."""
    if norm is None or _OF_SUM not in norm.__dict__ or not _fit(norm.weight, x, other):
        return x + other
    of_sum, eps = norm.__dict__[_OF_SUM]
    total, normed = of_sum(x, other, norm.weight, eps, epilogue_of(norm, x))
    norm.__dict__[_COMPUTED] = total, total._version, normed
    result: Tensor = total
    return result


def _fit(weight: Tensor, x: Tensor, other: Tensor) -> bool:
    """Whether a kernel can read these; the weight of the next layer may still be sharded. A tensor of inference mode has no version."""
    with torch._C.DisableTorchFunction():  # a mode of torch's functions would see every attribute
        whole = type(weight) in (nn.Parameter, Tensor) and x.shape == other.shape and not x.is_inference()
        return whole and all(t.dtype == weight.dtype and t.device == weight.device for t in (x, other))


class _Stub:
    """A stand-in for a layer in its class's forward, with the attributes that ``GradientCheckpointingLayer`` reads."""

    gradient_checkpointing = training = False
    forward: Any = None
    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any


def _is_standard(layer: Any) -> bool:
    """Whether the class's forward adds the results of attention and MLP of norms, and passes its keyword arguments to attention. An MLP returns a
    tensor, or a tensor and the scores of its router."""
    if not all(isinstance(getattr(layer, name, None), nn.Module) for name in _PARTS):
        return False
    return _adds(type(layer), torch.sin) or _adds(type(layer), lambda x: (torch.sin(x), None))


def _adds(base: Any, mlp: Callable[[Tensor], Any]) -> bool:
    passed: dict[str, Any] = {}

    def attend(hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        passed.update(kwargs)
        return 3 * hidden_states + 0.5, None

    stub = _Stub()
    stub.input_layernorm, stub.self_attn = (lambda x: 2 * x - 1), attend
    stub.post_attention_layernorm, stub.mlp = (lambda x: x - 0.25), mlp
    x = torch.linspace(-1, 1, 6).view(1, 2, 3)
    given = {name: object() for name in ("attention_mask", "position_ids", "position_embeddings", "call")}
    try:
        found = base.forward(stub, x, **given)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False
    middle = x + 3 * (2 * x - 1) + 0.5
    same = isinstance(found, Tensor) and torch.allclose(found, middle + torch.sin(middle - 0.25))
    return same and all(passed.get(name) is value for name, value in given.items())
