"""The steps of a model that a plugin may compute with code of its own: one table of functions a model.

torch computes all of them unless somebody says otherwise. A plugin that has kernels gives a model a table in ``on_model``::

    use_operations(model, replace(operations_of(model), log_probs=my_log_probs))

The table belongs to that model alone. ``norm``, ``rotation``, ``gate`` and ``route`` are called with the dtype and on the device that the model had
then. The others must take whatever it may bring later: where they have no kernel, they call the function that they replaced.
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
    """``Operations.log_probs`` by torch."""
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
    """``Operations.attention`` by torch: the call's own."""
    return call.attend(module, query, key, value, scaling, options)


@dataclass(frozen=True)
class Operations:
    """One model's table.

    Attributes:
        norm: (x [..., dim], weight [dim], eps) -> weight * x / sqrt(mean(x**2) + eps) over the last dimension, for the modules that
            compute this norm (Zhang and Sennrich 2019); None leaves Transformers' code in place.
        rotation: (x [1, heads, rows, dim], cosine [1, rows, dim], sine) -> x * cosine + (-x2 | x1) * sine, x1 and x2 the halves of x, for
            the attention modules that rotate so (Su et al. 2021); None leaves Transformers' code in place.
        gate: (gate [..., width], up [..., width]) -> silu(gate) * up, for the MLPs that compute ``down_proj(silu(gate_proj(x)) * up_proj(x))``
            (Shazeer 2020); None leaves Transformers' code in place.
        route: (logits [rows, experts], k, normalized) -> weights [rows, k] and index [rows, k] of the largest of a softmax in float32, for the
            routers that choose so; None leaves Transformers' code in place.
        experts: the arguments and the result of ``grouped_experts.swiglu_experts``: routing rows to the usual experts, the products,
            and the weighted sum.
        log_probs: (logits [rows, vocabulary], tokens [rows]) -> [rows] log softmax(logits) of the tokens, for those that are trained on,
            over the whole vocabulary and without the entropy.
        attention: (call, module, query, key, value, scaling, options) -> what ``call.attend`` returns for the rest of them, for every layer.
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
    """The table of the model that ``module`` is, or is part of."""
    found: Operations = module.__dict__.get(_ATTRIBUTE, TORCH)
    return found


def use_operations(model: nn.Module, operations: Operations) -> dict[str, int]:
    """Let ``model`` compute with these operations from now on.

    Parameters, names, classes and hooks of its modules stay. Norms and rotary embeddings are Transformers' own code, of which there are
    many variants under similar names, so a module gets the operation only if both compute the same on random numbers.

    Returns:
        How many norms (``norm``), attention modules (``rotation``), MLPs (``gate``) and routers (``route``) compute with the table's
        operation now.
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
