"""Letting the modules of a model compute with ``operations``.

Norms and rotary embedding are Transformers' own code, of which there are many variants under similar names. A module is changed only
after what it computes was compared with what the function here computes, on random numbers; parameters, names and hooks stay.
"""

from __future__ import annotations

import logging
import types
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from miles_core.errors import ConfigError
from miles_embedded.cpu import operations
from miles_embedded.cpu.library import library, why_not
from miles_embedded.cpu.linear import Linear, pays

log = logging.getLogger(__name__)

Kernels = Literal["auto", "compiled", "torch"]
FLAG = "--cpu-kernels"
#: Attribute of attention, experts and output modules that compute with compiled kernels; absent is no.
COMPILED = "compiled_kernels"
_ROTATION = "apply_rotary_pos_emb"
#: Of the comparison: float32 results of a handful of operations in another order.
_CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def compiled(module: nn.Module, *tensors: Tensor) -> bool:
    """Whether this module computes with compiled kernels on these tensors."""
    return getattr(module, COMPILED, False) and operations.fits(*tensors)


def use_kernels(model: nn.Module, kernels: Kernels = "auto") -> bool:
    """Change the modules of ``model``, on a CPU, that can be.

    Returns:
        Whether they compute with compiled kernels now.

    Raises:
        ConfigError: ``compiled`` is asked for and not possible.
    """
    if kernels == "torch":
        return False
    floats = all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())
    reason = why_not() if floats else "only a float32 model has them"
    if reason and kernels == "compiled":
        raise ConfigError(f"{FLAG} compiled: {reason}")
    _tell(reason)
    if reason:
        return False
    _change(model)
    return True


@cache
def _tell(reason: str) -> None:
    """Once a process: engine and trainer have a model each."""
    if reason:
        log.info("the CPU computes with torch alone, slower than with compiled kernels: %s", reason)
    else:
        log.info("the CPU computes with compiled kernels (%s torch turns them off)", FLAG)


def _change(model: nn.Module) -> None:
    library()
    model.get_output_embeddings().__dict__[COMPILED] = True
    for module in model.modules():
        name = type(module).__name__
        if type(module) is nn.Linear and pays():
            module.__class__ = Linear
        if name.endswith("RMSNorm"):
            _change_norm(module)
        elif isinstance(getattr(module, "down_proj", None), nn.Parameter):  # experts, whatever a release calls them
            module.__dict__[COMPILED] = True
        elif "Attention" in name:
            module.__dict__[COMPILED] = True
            _change_rotation(module)


def _change_norm(module: nn.Module) -> None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, Tensor) or weight.dim() != 1:
        return
    found = _norm_class(type(module))
    if found is None:
        return
    module.__class__ = found
    module.__dict__["compiled_eps"] = eps


@cache
def _norm_class(base: type[nn.Module]) -> type[nn.Module] | None:
    """A subclass whose forward is ``operations.rms_norm``; None where ``base`` computes something else."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.rand(size, generator=generator) + 0.5 for size in ((24,), (3, 24)))
    try:
        probe = base(24, eps=0.1).to("cpu", torch.float32)
        with torch.no_grad():
            probe.weight.copy_(weight)
            expected = probe(x)
    except (TypeError, AttributeError, RuntimeError):
        return None
    if not _same(expected, operations.rms_norm(x, weight, 0.1)):
        return None

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        if not operations.fits(hidden_states, self.weight):
            return base.forward(self, hidden_states)
        return operations.rms_norm(hidden_states, self.weight, self.compiled_eps)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _change_rotation(module: nn.Module) -> None:
    found = _rotation_class(type(module))
    if found is not None:
        module.__class__ = found


@cache
def _rotation_class(base: type[nn.Module]) -> type[nn.Module] | None:
    """A subclass whose forward is the same code with ``operations.rotate``; None where it rotates otherwise.

    The name that the code looks up is bound anew for the subclass alone: the module of Transformers is not touched.
    """
    forward = base.forward
    original = getattr(forward, "__globals__", {}).get(_ROTATION)
    if original is None or _ROTATION not in forward.__code__.co_names or not _rotates_halves(original):
        return None

    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        plain = not args and not kwargs and len(q) == len(k) == 1 and q.shape[3] % 2 == 0
        plain = plain and cos.shape == sin.shape == (1, *q.shape[2:]) == (1, *k.shape[2:])
        if not plain or not operations.fits(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **kwargs)
        return operations.rotate(q, cos, sin), operations.rotate(k, cos, sin)

    changed = types.FunctionType(
        forward.__code__,
        forward.__globals__ | {_ROTATION: rotation},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return type(base.__name__, (base,), {"forward": changed, "__module__": base.__module__})


def _rotates_halves(rotation: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(*s, generator=generator) for s in ((1, 3, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8)))
    try:
        expected = rotation(q, k, cos, sin)
    except (TypeError, RuntimeError):
        return False
    return all(_same(e, operations.rotate(x, cos, sin)) for e, x in zip(expected, (q, k), strict=True))


def _same(expected: Any, found: Tensor) -> bool:
    return isinstance(expected, Tensor) and expected.shape == found.shape and torch.allclose(expected, found, **_CLOSE)
