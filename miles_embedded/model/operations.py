"""The table of layer steps that plugins may replace with their own implementation, per model.

By default torch computes all steps. A plugin with kernels sets a model's table in ``on_model``::

    use_operations(model, replace(operations_of(model), log_probs=my_log_probs))

The table applies to that model only. ``norm``, ``rotation``, ``gate`` and ``route`` are called with the dtype and device that the model had
at that time; ``route`` also with float32 logits, for families whose weights are float32 in any model. The other operations must accept any
input: where they have no kernel, they call the function that they replaced.

Transformers calls ``call_attention``, registered as ``miles``, which calls the model's attention operation. It also scales queries by
position, as Llama 4 does in layers without a rotary embedding (arXiv 2501.19399). Transformers counts positions from the first row of a
call. Here a call contains several sequences, or the next tokens of many. Therefore the module's own factor is disabled while it runs for
a ``Call``, and each query is scaled by the factor of its position in its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.data.batch import Ragged
from miles_embedded.model.attention import AttentionOptions, attention_options, window_mask
from miles_embedded.model.call import Call, active_call
from miles_embedded.model.grouped_experts import swiglu_experts
from miles_embedded.model.kv_dtype import KV_DTYPE, round_to_cache
from miles_embedded.model.parts import backbone, decoder_layers
from miles_embedded.model.replaced_steps import (
    DeltaRule,
    Gate,
    Norm,
    Rotation,
    Route,
    replace_delta_rule,
    replace_gate,
    replace_norm,
    replace_rotation,
    replace_router,
)
from miles_embedded.model.replaced_sums import replace_sums

#: The products of the experts of a layer; the arguments are those of ``grouped_experts.swiglu_experts``.
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: ``log_probs(logits, tokens)``: the log-probabilities of tokens.
LogProbs = Callable[[Tensor, Tensor], Tensor]
LogSoftmax = Callable[[Tensor], Tensor]
SupportedLogProbs = Callable[[Tensor, Tensor, Ragged], Tensor]
#: ``attention(call, module, q, k, v, scale, options)``: the attention of one layer.
Attention = Callable[[Call, nn.Module, Tensor, Tensor, Tensor, float, AttentionOptions | None], Tensor]


def log_softmax(logits: Tensor) -> Tensor:
    """Default of ``Operations.log_softmax``, with torch."""
    return logits.log_softmax(-1)


def divide_by_temperature(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide logits [rows, vocabulary] by a temperature, or by one per row [rows, 1].

    A GPU multiplies by the reciprocal of a number but divides by a tensor, and an engine may have either; a tensor makes both the same.
    """
    if not isinstance(temperature, Tensor):
        if temperature == 1.0:
            return logits
        temperature = torch.full((), temperature, dtype=logits.dtype, device=logits.device)
    return logits / temperature


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Default of ``Operations.log_probs``, with torch."""
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def supported_log_probs(logits: Tensor, tokens: Tensor, support: Ragged) -> Tensor:
    """Default of ``Operations.supported_log_probs``: reads only the logits of the supports."""
    owner, values = logits_of_support(logits, support)
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - sum_support(owner, values, len(tokens))[0]


def logits_of_support(logits: Tensor, support: Ragged) -> tuple[Tensor, Tensor]:
    """Return the row and the logit of every supported token, one row after the other."""
    rows = torch.arange(len(logits), device=logits.device)
    owner = torch.repeat_interleave(rows, support.offsets.diff())
    return owner, logits[owner, support.values.long()]


def sum_support(owner: Tensor, values: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log of each row's sum of exponentials [rows], the exponentials divided by the row's largest, and their sums [rows]."""
    highest = values.detach().new_full((rows,), -torch.inf).scatter_reduce(0, owner, values.detach(), "amax")
    weights = (values - highest[owner]).exp()
    total = torch.zeros_like(highest).index_add(0, owner, weights)
    return total.log() + highest, weights, total


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


attention.static_prompts = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Operations:
    """Table of the operations of one model.

    Attributes:
        norm: (x [..., dim], weight [dim], eps) -> weight * x / sqrt(mean(x**2) + eps) over the last dimension, for modules that
            compute this norm (Zhang and Sennrich 2019); None keeps Transformers' code. It may have a method ``of_sum``: (x, other, weight, eps,
            epilogue) -> x + other and the norm of it, for the sums in decoder layers like Llama's (``replaced_sums``).
        rotation: (query [1, heads, rows, dim], key [1, key heads, rows, dim], cosine [1, rows, dim], sine) -> x * cosine + (-x2 | x1) * sine
            of both, with x1 and x2 the halves of x, for attention modules with this rotation (Su et al. 2021); None keeps Transformers' code.
        gate: (gate [..., width], up [..., width]) -> silu(gate) * up, for MLPs that compute
            ``down_proj(silu(gate_proj(x)) * up_proj(x))`` (Shazeer 2020); None keeps Transformers' code. The last parameter of ``norm`` and
            ``gate`` may be ``epilogue``, a ``kernels.epilogue.RowEpilogue`` or None, for kernels that can store their rows in a second form.
        route: (logits [rows, experts], k, normalized) -> weights [rows, k] and index [rows, k] of the k largest entries of a float32 softmax,
            for routers with this choice; None keeps Transformers' code. Its last parameter may be ``given``, [rows, k] integers or None: then
            the weights are those of the given experts, and the index is that of the k largest entries all the same.
        delta_rule: (query, key, value, decay, beta, states, before, after, normalize) -> the outputs of one token of each sequence of a gated delta
            net, with the arguments of ``kernels.delta_rule.advance_delta_rule``; None keeps Transformers' code.
        experts: routes rows to standard experts, multiplies, and sums the results; signature of ``grouped_experts.swiglu_experts``.
        log_softmax: (logits [rows, vocabulary] float32) -> log-probabilities of the same shape. The engine samples from these, and the
            trainer normalises with them wherever it needs more than ``log_probs``.
        log_probs: (logits [rows, vocabulary], tokens [rows]) -> [rows] log softmax(logits) of the tokens. Used for trained tokens over
            the whole vocabulary if no entropy is needed. It may have a method ``of_logits``: (logits, tokens, temperature) -> the same, float32,
            from logits that are neither converted to float32 nor divided; a table with a ``log_softmax`` of its own also receives temperatures
            [rows, 1] from the engine.
        supported_log_probs: (logits [rows, vocabulary], tokens [rows], support) -> [rows] log softmax over the ids of each row's support, for
            tokens whose sampler chose from a part of the vocabulary.
        attention: (call, module, query, key, value, scaling, options) -> the result of ``call.attend`` for the other arguments, for every
            layer. If it has a true attribute ``static_prompts``, it is also called with a ``StaticPromptCall``, so that CUDA graphs can compute
            prompts: it then may not read numbers from the device.
    """

    norm: Norm | None = None
    rotation: Rotation | None = None
    gate: Gate | None = None
    route: Route | None = None
    delta_rule: DeltaRule | None = None
    experts: Experts = swiglu_experts
    log_softmax: LogSoftmax = log_softmax
    log_probs: LogProbs = log_probs
    supported_log_probs: SupportedLogProbs = supported_log_probs
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
        Number of norms (``norm``), attention modules (``rotation``), MLPs (``gate``), routers (``route``) and gated delta nets (``delta_rule``)
        that use the table's operation, and of decoder layers whose sums do (``of_sum``).
    """
    done = dict.fromkeys(("norm", "rotation", "gate", "route", "delta_rule", "of_sum"), 0)
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
        elif name.endswith("DeltaNet"):
            done["delta_rule"] += replace_delta_rule(module, operations.delta_rule)
    if hasattr(model, "base_model_prefix"):  # a model, not one of its layers
        done["of_sum"] = replace_sums(decoder_layers(model), getattr(backbone(model), "norm", None))
    return done


_SWITCH = "attn_temperature_tuning"
#: Attribute that marks modules whose factor is applied here.
_TUNED = "miles_tuned"


def tune_by_position(attention: nn.Module) -> None:
    """Make ``scale_query`` scale the queries of this module, if it scales by position."""
    module: Any = attention
    if getattr(module, _SWITCH, False) and not module.use_rope:
        module.__dict__[_TUNED] = True
        module.register_forward_pre_hook(_switch, with_kwargs=True)


def scale_query(attention: nn.Module, query: Tensor, call: Call) -> Tensor:
    """Scale ``query`` [1, heads, rows, dim] by the factor of each row's position."""
    module: Any = attention
    if _TUNED not in module.__dict__:
        return query
    floor = torch.floor((call.positions.float() + 1.0) / module.floor_scale)
    factor = torch.log1p(floor) * module.attn_scale + 1.0
    return (query * factor[:, None]).to(query.dtype)


def _switch(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    module.__dict__[_SWITCH] = kwargs.get("call") is None


def call_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    call: Call | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer with its model's attention operation.

    Args:
        module: the layer's attention module.
        query: [1, heads, rows, dim].
        key: [1, kv heads, rows, dim].
        value: [1, kv heads, rows, value dim].
        attention_mask: the result of ``make_mask``.
        scaling: factor on the scores; None for 1 / sqrt(dim).
        call: the call that the rows belong to; None for the active one.
        kwargs: further arguments of the family.

    Returns:
        [1, rows, heads, value dim], and None in place of attention weights.
    """
    call = call or active_call()
    if call is None:
        raise RuntimeError("this model attends through a Call; pass call=... (see miles_embedded.model.call)")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if KV_DTYPE in call.ctx.attached:
        key, value = (round_to_cache(x, call.ctx.attached[KV_DTYPE]) for x in (key, value))
    query = scale_query(module, query, call)
    options = attention_options(module, attention_mask, kwargs)
    if options is not None:
        options = options.within(call.longest)
    out = operations_of(module).attention(call, module, query, key, value, scaling, options)
    return out.contiguous(), None  # contiguous as from Transformers' own functions: some families view the result


def make_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Mask function registered under the same name. A ``Call`` defines the mask except for the layer's window or chunk size."""
    return None if local_size is None else window_mask(local_size)
