"""The table of layer steps that plugins may replace with their own implementation, per model.

By default torch computes all steps. A plugin with kernels sets a model's table in ``on_model``::

    use_operations(model, replace(operations_of(model), log_probs=my_log_probs))

The table applies to that model only. ``norm``, ``rotation``, ``gate`` and ``route`` are called with the dtype and device that the model had
at that time. The other operations must accept any input: where they have no kernel, they call the function that they replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from miles_embedded.model.attention import AttentionOptions
from miles_embedded.model.call import Call
from miles_embedded.model.grouped_experts import swiglu_experts
from miles_embedded.model.replaced_steps import (
    Gate,
    Norm,
    Rotation,
    Route,
    replace_gate,
    replace_norm,
    replace_rotation,
    replace_router,
)

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
LogProbs = Callable[[Tensor, Tensor], Tensor]
Attention = Callable[[Call, nn.Module, Tensor, Tensor, Tensor, float, AttentionOptions | None], Tensor]


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Default of ``Operations.log_probs``, with torch."""
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def attention(
    call: Call,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    options: AttentionOptions | None,
) -> Tensor:
    """Default of ``Operations.attention``: the call's own implementation."""
    return call.attend(module, query, key, value, scaling, options)


@dataclass(frozen=True)
class Operations:
    """Table of the operations of one model.

    Attributes:
        norm: (x [..., dim], weight [dim], eps) -> weight * x / sqrt(mean(x**2) + eps) over the last dimension, for modules that
            compute this norm (Zhang and Sennrich 2019); None keeps Transformers' code.
        rotation: (x [1, heads, rows, dim], cosine [1, rows, dim], sine) -> x * cosine + (-x2 | x1) * sine, with x1 and x2 the halves of
            x, for attention modules with this rotation (Su et al. 2021); None keeps Transformers' code.
        gate: (gate [..., width], up [..., width]) -> silu(gate) * up, for MLPs that compute
            ``down_proj(silu(gate_proj(x)) * up_proj(x))`` (Shazeer 2020); None keeps Transformers' code.
        route: (logits [rows, experts], k, normalized) -> weights [rows, k] and index [rows, k] of the k largest entries of a float32 softmax,
            for routers with this choice; None keeps Transformers' code.
        experts: routes rows to standard experts, multiplies, and sums the results; signature of ``grouped_experts.swiglu_experts``.
        log_probs: (logits [rows, vocabulary], tokens [rows]) -> [rows] log softmax(logits) of the tokens. Used for trained tokens over
            the whole vocabulary if no entropy is needed.
        attention: (call, module, query, key, value, scaling, options) -> the result of ``call.attend`` for the other arguments, for every
            layer.
    """

    norm: Norm | None = None
    rotation: Rotation | None = None
    gate: Gate | None = None
    route: Route | None = None
    experts: Experts = swiglu_experts
    log_probs: LogProbs = log_probs
    attention: Attention = attention


TORCH = Operations()
_ATTRIBUTE = "miles_operations"


def operations_of(module: nn.Module) -> Operations:
    """Return the table of the model that contains ``module``."""
    found: Operations = module.__dict__.get(_ATTRIBUTE, TORCH)
    return found


def use_operations(model: nn.Module, operations: Operations) -> dict[str, int]:
    """Make ``model`` use these operations.

    Parameters, names, classes and hooks of its modules do not change. Transformers has many variants of norms and rotary embeddings under
    similar names, so such a module uses the operation only if both give the same results on random numbers.

    Returns:
        Number of norms (``norm``), attention modules (``rotation``), MLPs (``gate``) and routers (``route``) that use the table's operation.
    """
    done = dict.fromkeys(("norm", "rotation", "gate", "route"), 0)
    for module in model.modules():
        module.__dict__[_ATTRIBUTE] = operations
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            done["norm"] += replace_norm(module, operations.norm)
        elif "Attention" in name:
            done["rotation"] += replace_rotation(module, operations.rotation)
        elif name.endswith("MLP"):
            done["gate"] += replace_gate(module, operations.gate)
        elif name.endswith("TopKRouter"):
            done["route"] += replace_router(module, operations.route)
    return done
