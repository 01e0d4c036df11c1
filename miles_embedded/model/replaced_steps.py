"""Replace norms, rotary embeddings, gates and routers of Transformers' modules by operations of the model's table.

An instance forward replaces the class's forward only if both give the same results on random numbers of the module's dtype and device;
for any other dtype, device or shape the instance forward calls the class's. Classes and modules of Transformers are not modified.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from miles_embedded.model.parts import put_forward
from miles_embedded.model.replaced_sums import set_of_sum, take_computed
from miles_embedded.model.row_readers import accepts_epilogue, compute_rows
from miles_embedded.model.states import STORING, StoredStates

_ROTATION = "apply_rotary_pos_emb"
_DELTA_RULE = "torch_recurrent_gated_delta_rule"
#: Tolerance of the comparison, in units of the dtype's epsilon: a few operations in another order.
_PLACES = 16


Norm = Callable[..., Tensor]
Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Gate = Callable[..., Tensor]
Route = Callable[..., tuple[Tensor, Tensor]]
DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Tensor]


def replace_norm(module: Any, norm: Norm | None) -> bool:
    """Make a norm module use ``norm`` if both agree; otherwise, and for None, restore its class's forward. Returns whether it does."""
    module.__dict__.pop("forward", None)
    set_of_sum(module, None, 0.0)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if norm is None or not isinstance(eps, float) or not isinstance(weight, Tensor) or weight.dim() != 1:
        return False
    dtype, device, base = weight.dtype, weight.device.type, cast(Any, type(module))
    if not _same_norm(base, norm, dtype, device):
        return False
    stores = accepts_epilogue(norm)
    if _has_same_sum(norm, dtype, device):
        set_of_sum(module, cast(Any, norm).of_sum, eps)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        computed = take_computed(self, hidden_states)
        if computed is not None:
            return computed
        if not _all_are(dtype, device, hidden_states, self.weight):
            return type(self).forward(self, hidden_states)
        if stores:
            return compute_rows(self, norm, hidden_states, self.weight, eps)
        return norm(hidden_states, self.weight, eps)

    put_forward(module, forward)
    return True


def replace_rotation(module: Any, rotation: Rotation | None) -> bool:
    """Make an attention module use ``rotation`` if both agree; otherwise, and for None, restore its class's forward.

    Attention without rotary embeddings keeps its forward, which may be another replacement (``states.use_states``).
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or _ROTATION not in code.co_names:
        return False
    module.__dict__.pop("forward", None)
    like = next(module.parameters(), None)
    if rotation is None or like is None:
        return False
    forward = _rotating_forward(cast(Any, type(module)), rotation, like.dtype, like.device.type)
    if forward is None:
        return False
    put_forward(module, forward)
    return True


def replace_delta_rule(module: Any, advance: DeltaRule | None) -> bool:
    """Make a gated delta net compute single tokens by ``advance`` if both agree; otherwise, and for None, restore its class's step.

    Only states that are stored (``StoredStates``) are advanced so; others go through Transformers' function.
    """
    module.__dict__.pop(STORING, None)
    forward: Any = inspect.unwrap(type(module).forward)
    original = getattr(forward, "__globals__", {}).get(_DELTA_RULE)
    if advance is None or original is None or _DELTA_RULE not in forward.__code__.co_names:
        return False
    like = next(module.parameters())
    if not _same_delta_rule(original, advance, like.dtype, like.device.type):
        return False

    def step(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        states = kwargs.get("initial_state")
        if not isinstance(states, StoredStates):
            found: tuple[Tensor, Any] = original(query, key, value, g=g, beta=beta, **kwargs)
            return found
        normalize = kwargs.get("use_qk_l2norm_in_kernel", False)
        return advance(query, key, value, g, beta, states.slab, states.before, states.after, normalize), states

    module.__dict__[STORING] = _rebind_global(type(module).forward, _DELTA_RULE, step)
    return True


def replace_gate(module: Any, gate: Gate | None) -> bool:
    """Make an MLP use ``gate`` if both agree; otherwise, and for None, restore its class's forward."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(part, nn.Module) for part in parts):
        return False
    module.__dict__.pop("forward", None)
    like, active = next(module.parameters(), None), getattr(module, "act_fn", None)
    if gate is None or like is None or not callable(active):
        return False
    dtype, device = like.dtype, like.device.type
    if not _same_gate(type(module), active, gate, dtype, device):
        return False
    stores = accepts_epilogue(gate)

    def forward(self: Any, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        if not _all_are(dtype, device, x):
            return type(self).forward(self, x)
        if stores:
            return self.down_proj(compute_rows(self, gate, self.gate_proj(x), self.up_proj(x)))
        return self.down_proj(gate(self.gate_proj(x), self.up_proj(x)))

    put_forward(module, forward)
    return True


def replace_router(module: Any, route: Route | None) -> bool:
    """Make a router use ``route`` if both agree; otherwise, and for None, restore its class's forward."""
    weight, k = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(k, int):
        return False
    module.__dict__.pop("forward", None)
    if route is None:
        return False
    dtype, device = weight.dtype, weight.device.type
    # Mixtral's weights are those of converted logits: FP32 in a model of any dtype
    types = dict.fromkeys((dtype, torch.float32))
    rules = [(n, t) for n in (True, False) for t in types if _same_route(module, route, n, t, dtype, device)]
    if len(rules) != 1:
        return False
    ((normalized, kind),) = rules

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., dim] -> logits [rows, experts], weights [rows, k], index [rows, k]."""
        if not _all_are(dtype, device, hidden_states, self.weight):
            return type(self).forward(self, hidden_states)
        logits = linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        return (logits, *route(logits.to(kind), self.top_k, normalized))

    put_forward(module, forward)
    return True


def _same_route(
    module: Any, route: Route, normalized: bool, kind: torch.dtype, dtype: torch.dtype, device: str
) -> bool:
    """Whether the class's forward, with other weights, is a product and ``route`` of its result converted to ``kind``."""
    x, weight = (2 * t - 2 for t in _random(dtype, device, (5, 24), (16, 24)))
    given = {name: getattr(module, name) for name in ("norm_topk_prob",) if hasattr(module, name)}
    stub = SimpleNamespace(weight=weight, hidden_dim=24, num_experts=16, top_k=2, **given)
    try:
        expected = type(module).forward(stub, x)
    except (TypeError, AttributeError, RuntimeError):
        return False
    logits = linear(x, weight)
    found = (logits, *route(logits.to(kind), 2, normalized))
    if not isinstance(expected, tuple) or len(expected) != len(found):
        return False
    pairs = list(zip(expected, found, strict=True))
    return (
        all(a.dtype == b.dtype for a, b in pairs)
        and all(_same(a, b) for a, b in pairs[:2])
        and bool((pairs[2][0] == pairs[2][1]).all())
    )


def accepts_given(route: Route | None) -> bool:
    """Whether ``Operations.route`` computes the weights of given experts: the last parameter is ``given``."""
    return route is not None and list(inspect.signature(route).parameters)[-1:] == ["given"]


def _same_gate(base: Any, active: Any, gate: Gate, dtype: torch.dtype, device: str) -> bool:
    """Whether the class computes a gated MLP with ``gate``, its three products stood in for."""
    x, other = _random(dtype, device, (1, 3, 24), (1, 3, 24))
    products = {"gate_proj": lambda x: x - 1, "up_proj": lambda x: x * other, "down_proj": lambda x: x + other}
    try:
        expected = base.forward(SimpleNamespace(**products, act_fn=active), x)
    except (TypeError, AttributeError, RuntimeError):
        return False
    plain = silu(x - 1) * (x * other)
    return _same(expected, plain + other) and _same(plain, gate(x - 1, x * other))


@cache
def _same_norm(base: type[Any], norm: Norm, dtype: torch.dtype, device: str) -> bool:
    weight, x = _random(dtype, device, (24,), (3, 24))
    try:
        probe = base(24, eps=0.1).to(device, dtype)
        with torch.no_grad():
            probe.weight.copy_(weight)
            expected = probe(x)
    except (TypeError, AttributeError, RuntimeError):
        return False
    return _same(expected, norm(x, weight, 0.1))


@cache
def _has_same_sum(norm: Any, dtype: torch.dtype, device: str) -> bool:
    """Whether ``norm`` has a method ``of_sum`` that returns a sum and its norm."""
    if not hasattr(norm, "of_sum"):
        return False
    weight, x, other = _random(dtype, device, (24,), (3, 24), (3, 24))
    with torch.no_grad():
        total, found = norm.of_sum(x, other, weight, 0.1, None)
        return torch.equal(total, x + other) and _same(norm(total, weight, 0.1), found)


@cache
def _rotating_forward(base: Any, rotation: Any, dtype: torch.dtype, device: str) -> Callable[..., Any] | None:
    """Return the class's forward with ``rotation`` in place of its rotary function; None if the class rotates differently.

    Transformers looks up the rotation as a global of the model's file and has no extension point for it. The forward is therefore built
    from the class's code object with only that global rebound. The alternative, changing the global, would affect every model of the
    process.
    """
    forward: Any = inspect.unwrap(base.forward)
    original = getattr(forward, "__globals__", {}).get(_ROTATION)
    if original is None or not _same_rotation(original, rotation, dtype, device):
        return None

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        with torch._C.DisableTorchFunction():  # as in ``_all_are``
            plain = not args and not kwargs and len(q) == len(k) == 1 and q.shape[3] % 2 == 0
            plain = plain and cos.shape == sin.shape == (1, *q.shape[2:]) == (1, *k.shape[2:])
        if not plain or not _all_are(dtype, device, q, k, cos, sin):
            found: tuple[Tensor, Tensor] = original(q, k, cos, sin, *args, **kwargs)
            return found
        return cast(Rotation, rotation)(q, k, cos, sin)

    return _rebind_global(base.forward, _ROTATION, rotate)


def _rebind_global(function: Any, name: str, value: Any) -> Callable[..., Any]:
    """Copy ``function`` with the global ``name`` rebound to ``value``, inside the decorators around it."""
    inner = getattr(function, "__wrapped__", None)
    names, closure = function.__globals__, function.__closure__
    if inner is None:
        names = names | {name: value}
    else:
        changed = _rebind_global(inner, name, value)
        closure = tuple(types.CellType(changed) if cell.cell_contents is inner else cell for cell in closure or ())
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _same_rotation(original: Any, rotation: Rotation, dtype: torch.dtype, device: str) -> bool:
    q, k, cos, sin = _random(dtype, device, (1, 3, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8))
    try:
        expected = original(q, k, cos, sin)
    except (TypeError, RuntimeError):
        return False
    return all(_same(*pair) for pair in zip(expected, rotation(q, k, cos, sin), strict=True))


@cache
def _same_delta_rule(original: Any, advance: DeltaRule, dtype: torch.dtype, device: str) -> bool:
    shapes = ((3, 1, 2, 16), (3, 1, 2, 16), (3, 1, 4, 8), (3, 1, 4), (3, 1, 4), (7, 4, 16, 8))
    query, key, value, g, beta, slab = _random(dtype, device, *shapes)
    before, after = torch.tensor([[4, 1, 2], [3, 0, 6]], device=device)
    slab, g = slab.float(), -g.float()
    with torch.no_grad():
        given = {"initial_state": slab[before], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        try:
            expected, state = original(query, key, value, g=g, beta=beta, **given)
        except (TypeError, RuntimeError):
            return False
        found = advance(query, key, value, g, beta, slab, before, after, True)
    return _same(expected, found) and _same(state, slab[after])


def _random(dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(shape, generator=generator) + 0.5).to(device, dtype) for shape in shapes]


def _same(expected: Any, found: Tensor) -> bool:
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return False
    places = _PLACES * torch.finfo(found.dtype).eps
    return bool(torch.allclose(expected, found, rtol=places, atol=places))


def _all_are(dtype: torch.dtype, device: str, *tensors: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # a mode of torch's functions would see every attribute
        return all(x.dtype == dtype and x.device.type == device for x in tensors)
