"""Records and replays routes in Transformers modules that ``miles_embedded`` loaded.

Almost every family calls ``experts(hidden, index, weights)``; a hook there reads routes (rollout) or replaces them (training). The logits come
from the router's output in the same call. If the router computes its choice with an operation that accepts given experts (on a GPU), the operation
returns the weights of the replayed ones, together with the own choice. Llama 4's experts instead receive rows weighted by the router's scores, so the
scores are replaced. Modules store no state: routes arrive in ``ctx.attached`` and leave in ``ctx.extras``, so a recomputation replays the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.plugin import PluginError
from miles_core.trainer import GIVEN_ROUTES, OWN_ROUTES, Context
from miles_embedded import (
    Routed,
    accepts_given,
    active_context,
    class_forwards,
    find_routed,
    operations_of,
    routed_blocks,
    use_operations,
)
from miles_r3 import ROUTES, index_dtype
from miles_r3.deterministic import lowest_first_top_k, router_logits, scores_for_choice
from miles_r3.routers import (
    RULES,
    Weights,
    setting,
    sigmoid_of_gathered,
    softmax_in_float,
    softmax_scaled,
    softmax_then_gather,
)

#: Keys in ``Context.attached``: the routes to replay, the mask of rows with a record, a router's logits until its experts run, the
#: trainer's own choices, and the layer whose router has replayed its routes itself, until its experts run.
REPLAY, RECORDED, LOGITS, OWN, REPLAYED = GIVEN_ROUTES, "r3.recorded", "r3.logits", OWN_ROUTES, "r3.replayed"
#: Key in ``Context.attached``: the engine's choices by layer, until all layers have chosen.
LAYERS = "r3.layers"


def moe_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the MoE blocks of a model in layer order."""
    return [found.block for found in routed_blocks(model)]


def tap(model: nn.Module, deterministic: bool = False) -> None:
    """Hook every router of ``model``. Raises PluginError if a router's weights cannot be recomputed exactly."""
    blocks = routed_blocks(model)
    if not blocks:
        raise PluginError(
            f"r3 found no router in {type(model).__name__}; routing replay needs a mixture-of-experts model"
        )
    for position, found in enumerate(blocks):
        if found.top_k:
            found.router.register_forward_hook(_scores_hook(position, len(blocks), found, deterministic))
            continue
        rule = matching_rule(found.block)
        found.scores.register_forward_hook(_keep_exact_logits if deterministic else _keep_logits)
        hook = _experts_hook(position, len(blocks), found, rule, deterministic)
        found.experts.register_forward_pre_hook(hook)
        if not deterministic:
            _replay_in_operation(position, len(blocks), found, rule)


def _replay_in_operation(position: int, count: int, found: Routed, rule: Weights) -> None:
    """Let a router's own operation compute the weights of replayed experts, if it accepts them.

    Raises:
        PluginError: the operation's weights are not those of ``rule`` on random input."""
    table = operations_of(found.router)
    route = table.route
    if route is None or not accepts_given(route) or rule not in (softmax_then_gather, softmax_in_float):
        return
    installed = False

    def replay(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
        # while ``use_operations`` compares, another model's context may be active: that of its last recomputation
        ctx = active_context() if installed else None
        if ctx is None or ctx.kind == "rollout" or REPLAY not in ctx.attached:
            plain: tuple[Tensor, Tensor] = route(logits, k, normalized)
            return plain
        index = _given_routes(ctx, position, count, len(logits), k)
        weights, own = route(logits, k, normalized, index)
        ctx.attached.setdefault(OWN, {})[position] = own
        ctx.attached[REPLAYED] = position
        return weights, index

    installed = bool(use_operations(found.router, replace(table, route=replay))["route"])
    if installed:
        _check_operation(route, found, rule)


def _check_operation(route: Callable[..., tuple[Tensor, Tensor]], found: Routed, rule: Weights) -> None:
    """Compare the weights of random experts, which may differ by the order of additions and therefore round to neighbours.

    Raises:
        PluginError: they differ by more."""
    weight, generator = found.scores.weight, torch.Generator().manual_seed(0)
    logits = torch.randn(64, found.count, generator=generator).to(weight.device, weight.dtype)
    index = torch.rand(64, found.count, generator=generator).to(weight.device).topk(found.scores.top_k).indices
    expected = rule(logits, index, found.block)
    normalized = bool(setting(found.block, "norm_topk_prob", True))
    weights, _ = route(logits.to(expected.dtype), index.shape[1], normalized, index)
    small = 16 * torch.finfo(torch.float32).eps
    places = small + 2 * torch.finfo(expected.dtype).eps
    if weights.dtype != expected.dtype or not torch.allclose(weights, expected, rtol=places, atol=small):
        raise PluginError(
            f"r3 cannot replay {type(found.block).__name__}: its operation for routes gives replayed experts other weights than the "
            "family's code; run without r3, or without the plugin that replaces this operation"
        )


def matching_rule(block: nn.Module) -> Weights:
    """Return the rule that reproduces this block's gate weights bitwise on random input. Raises PluginError if none does.

    The family's code is compared, without steps that the model computes with other kernels (on a GPU, ``Operations.route``): these round
    differently. The rules read the indices that the router chose, so the order of equal logits has no influence."""
    found = find_routed(block)
    assert found is not None
    seen: dict[str, Any] = {"rule": None}
    handle = found.scores.register_forward_hook(lambda m, a, out: seen.update(logits=_logits(out)))
    weight, generator = found.scores.weight, torch.Generator().manual_seed(0)
    # Some routers have float32 weights in a model of another dtype, and convert their input.
    dtype = next((p.dtype for p in found.experts.parameters() if p.is_floating_point()), weight.dtype)
    hidden = torch.randn(1, 64, weight.shape[-1], generator=generator).to(weight.device, dtype)
    # Algebraically equal rules may agree on all these rows, so the more likely rule is tried first: families with a softmax of
    # gathered logits have no ``gate``. A learned scale may still be 1.
    rules = RULES if getattr(block, "gate", None) is not None else RULES[::-1]
    if hasattr(found.router, "per_expert_scale"):
        rules = (softmax_scaled,)

    def compare(index: Tensor, given: Tensor) -> None:
        seen["rule"] = next((rule for rule in rules if _is_equal(rule(seen["logits"], index, block), given)), None)

    try:
        with torch.no_grad(), class_forwards(found.router):
            _see_choice(found, hidden, compare)
    finally:
        handle.remove()
    if seen["rule"] is None:
        raise PluginError(
            f"r3 cannot replay {type(block).__name__}: none of its {len(RULES)} rules reproduces this router's weights "
            "exactly; run without r3"
        )
    matching: Weights = seen["rule"]
    return matching


def _is_equal(own: Tensor, given: Tensor) -> bool:
    return own.dtype == given.dtype and torch.equal(own, given)


def _see_choice(found: Routed, hidden: Tensor, see: Callable[[Tensor, Tensor], None]) -> None:
    """Run the block on ``hidden`` [1, rows, dim] and call ``see`` with the index and weights [rows, k] that its experts receive.

    ``see`` runs inside the block, as a replay does: a plugin may replace torch's functions there (``true_on_policy``). If the block is the
    decoder layer itself, which needs more inputs than hidden states, its router returns both."""
    if hasattr(found.block, "self_attn"):
        returned = found.router(hidden[0])
        (index,) = (x for x in returned if not x.is_floating_point())
        (weights,) = (x for x in returned if x.is_floating_point() and x.shape == index.shape)
        see(index, weights)
        return
    handle = found.experts.register_forward_pre_hook(lambda module, args: see(args[1], args[2]))
    try:
        found.block(hidden)
    finally:
        handle.remove()


def _keep_logits(gate: nn.Module, args: tuple, output: Any) -> None:
    ctx = active_context()
    if ctx is not None and REPLAY in ctx.attached:
        ctx.attached[LOGITS] = _logits(output)


def _keep_exact_logits(gate: nn.Module, args: tuple, output: Any) -> None:
    ctx = active_context()
    if ctx is not None:
        ctx.attached[LOGITS] = router_logits(gate, args[0])


def _logits(output: Any) -> Tensor:
    """Return a router's logits [rows, experts]: its output or the first element of its output."""
    logits = output[0] if isinstance(output, tuple) else output
    return logits.reshape(-1, logits.shape[-1])


def _experts_hook(position: int, count: int, found: Routed, rule: Weights, deterministic: bool) -> Any:
    block = found.block

    def hook(experts: nn.Module, args: tuple) -> tuple | None:
        ctx = active_context()
        if ctx is None:
            return None
        hidden, own, weights = args
        logits = ctx.attached.pop(LOGITS, None)
        if ctx.attached.pop(REPLAYED, None) == position:
            return None  # ``own`` is the index that was replayed
        if deterministic:
            own = lowest_first_top_k(scores_for_choice(logits.detach(), block, rule), own.shape[-1])
        if ctx.kind == "rollout":
            record(ctx, position, count, own, found.count)
        elif REPLAY in ctx.attached:
            index = _replayed(ctx, position, count, own)
            return hidden, index, rule(logits, index, block).to(weights.dtype)
        return (hidden, own, rule(logits, own, block).to(weights.dtype)) if deterministic else None

    return hook


def _scores_hook(position: int, count: int, found: Routed, deterministic: bool) -> Any:
    """Return a hook for a router that returns (scores [rows, experts], 0 for experts that were not chosen, and logits)."""

    def hook(router: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        ctx = active_context()
        if ctx is None:
            return None
        scores, logits = output
        own = scores.topk(found.top_k)[1]
        if deterministic:
            logits = router_logits(router, args[0])
            own = lowest_first_top_k(logits.detach(), found.top_k)
        index = own
        if ctx.kind == "rollout":
            record(ctx, position, count, own, found.count)
        elif REPLAY in ctx.attached:
            index = _replayed(ctx, position, count, own)
        elif not deterministic:
            return None
        weights = sigmoid_of_gathered(logits, index, found.block).to(scores.dtype)
        return torch.zeros_like(scores).scatter(-1, index, weights), output[1]

    return hook


def _replayed(ctx: Context, position: int, count: int, own: Tensor) -> Tensor:
    """Return one layer's routes [rows, k] to replay, and store the trainer's own choices in the context."""
    index = _given_routes(ctx, position, count, *own.shape)
    ctx.attached.setdefault(OWN, {})[position] = own.detach()
    return index


def _given_routes(ctx: Context, position: int, count: int, rows: int, k: int) -> Tensor:
    """Return one layer's routes [rows, k] to replay. Raises PluginError if they are another model's."""
    routes: Tensor = ctx.attached[REPLAY]
    if routes.shape != (rows, count, k):
        raise PluginError(
            f"r3 cannot replay routes of shape {list(routes.shape)} (rows, layers, experts per token) in a model with {count} "
            f"mixture-of-experts layers and {k} experts per token, for {rows} rows; engine and trainer must run the same model"
        )
    return routes[:, position]


def record(ctx: Context, position: int, count: int, index: Tensor, experts: int) -> None:
    """Keep one layer's choices [rows, k] of ``experts`` experts. Those of all ``count`` layers become the call's record [rows, layers, k] at once:
    a decode step of one launch per layer would be slower."""
    layers = ctx.attached.setdefault(LAYERS, {})
    layers[position] = index
    if len(layers) == count:
        whole = torch.stack([layers[i] for i in range(count)], 1)
        ctx.extras[ROUTES.name] = whole.to(getattr(torch, index_dtype(experts)))
        del ctx.attached[LAYERS]
