"""The steps of a model that a plugin may compute with code of its own: one table of functions a model.

torch computes all of them unless somebody says otherwise. A plugin that has kernels gives a model a table in ``on_model``::

    use_operations(model, replace(operations_of(model), log_probs=my_log_probs))

The table belongs to that model alone. A function in it must take whatever its model may bring later, another dtype for
instance: where it has no kernel, it calls the one that it replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from miles_embedded.model.attention import AttentionOptions
from miles_embedded.model.call import Call
from miles_embedded.model.grouped_experts import swiglu_experts
from miles_embedded.model.replaced_steps import Norm, Rotation, replace_norm, replace_rotation


class Experts(Protocol):
    """Routing rows to experts, the products, and the weighted sum: see ``grouped_experts.swiglu_experts``."""

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, /) -> Tensor: ...


class LogProbs(Protocol):
    """log softmax(logits [rows, vocabulary])[tokens [rows]] -> [rows]."""

    def __call__(self, logits: Tensor, tokens: Tensor, /) -> Tensor: ...


class Attention(Protocol):
    """The attention of one layer: arguments and result of ``Call.attend``, behind the call itself."""

    def __call__(
        self,
        call: Call,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        options: AttentionOptions | None,
        /,
    ) -> Tensor: ...


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """``LogProbs`` by torch."""
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
    """``Attention`` by torch: the call's own."""
    return call.attend(module, query, key, value, scaling, options)


@dataclass(frozen=True)
class Operations:
    """One model's table.

    Attributes:
        norm: of the modules that compute this norm; None leaves Transformers' code in place.
        rotation: of the attention modules that rotate so; None leaves Transformers' code in place.
        experts: of the experts modules that are the usual ones.
        log_probs: of trained tokens, over the full vocabulary and without the entropy.
        attention: of every layer.
    """

    norm: Norm | None = None
    rotation: Rotation | None = None
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
        How many norms (``norm``) and attention modules (``rotation``) compute with the table's operation now.
    """
    done = {"norm": 0, "rotation": 0}
    for module in model.modules():
        module.__dict__[_ATTRIBUTE] = operations
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            done["norm"] += replace_norm(module, operations.norm)
        elif "Attention" in name:
            done["rotation"] += replace_rotation(module, operations.rotation)
    return done
