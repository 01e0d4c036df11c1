"""Where r3 plugs in: ask for routes, hand them to the forward, count disagreements, tap the modules that it can.

A trainer with modules of its own takes the routes from ``ctx.attached`` itself (``miles_core.backend.GIVEN_ROUTES``); a forward that leaves
no choices of its own there has not replayed and stops the run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core import Batch, Context, DataError, Output, PluginError, Sample, hookimpl
from miles_embedded import is_embedded
from miles_r3 import ROUTES
from miles_r3.config import R3Config
from miles_r3.embedded import OWN, RECORDED, REPLAY, tap
from miles_r3.spill import RouteBuffer

#: Passes over sampled tokens by the policy. Reference, teacher and critic passes route for themselves.
REPLAYED = ("old", "train", "verify")


class R3:
    """Routing replay."""

    def __init__(self, options: R3Config) -> None:
        self.options = options
        self.buffer: RouteBuffer | None = None
        self.counts: tuple[int | None, ...] = ()
        self._reported = 0

    @hookimpl
    def on_model(self, model: nn.Module, role: str) -> None:
        tapped = ("rollout", "train", "shared", *(("ref",) if self.options.deterministic else ()))
        if role in tapped and is_embedded(model):
            tap(model, self.options.deterministic)

    @hookimpl
    def on_sample(self, run: Any, sample: Sample) -> None:
        routes = sample.fields.get(ROUTES.name)
        if routes is None:
            return
        routes = np.asarray(routes)
        if self.buffer is None:
            self.buffer = RouteBuffer(run.directory / "routes", self.options.buffer_size)
            # asked once: this hook is called for every sample
            self.counts = tuple(run.plan.fact(f"model.{n}", None) for n in ("num_experts", "moe_layers", "top_k"))
        check_routes(sample.index, routes, *self.counts)
        routes = routes.astype(ROUTES.dtype, copy=False)
        sample.fields[ROUTES.name] = self.buffer.keep(routes, self.counts[0] or int(routes.max(initial=0)) + 1)

    @hookimpl
    def on_step(self, metrics: dict[str, float]) -> None:
        if self.buffer is not None and self.options.buffer_size is not None:
            metrics["r3/records_spilled"] = float(self.buffer.spilled - self._reported)
            self._reported = self.buffer.spilled

    @hookimpl
    def on_request(self, request: Any) -> None:
        request.extras.add(ROUTES.name)

    @hookimpl
    def wrap_forward(self, run: Any, policy: Any) -> Any:
        if not policy.generates:
            return None  # a critic or a teacher reads samples that another model's routers made
        experts = int(run.plan.fact("model.num_experts", 0) or 0)

        def wrap(inner: Any) -> Any:
            def forward(chunk: Any, micro_batch: Batch, ctx: Context) -> Output:
                replayed = ctx.kind in REPLAYED and sampled(micro_batch)
                if replayed:
                    column = micro_batch.columns[ROUTES.name]
                    assert isinstance(column, Tensor)
                    ctx.attached[REPLAY], ctx.attached[RECORDED] = routes_of_rows(column, ctx.rows, experts)
                output: Output = inner(chunk, micro_batch, ctx)
                if replayed and OWN not in ctx.attached:
                    raise PluginError(
                        f"r3: nothing in {type(chunk).__name__} of --trainer {run.config.run.trainer} took the routes of the rollout, so "
                        "it would train with routes of its own; this trainer declares routing_replay and does not replay: "
                        "run without r3, or with --trainer embedded"
                    )
                if ctx.kind == "train":
                    ctx.metrics.update(disagreement(ctx))
                return output

            return forward

        return wrap


def check_routes(number: int, routes: np.ndarray, experts: int | None, layers: int | None, k: int | None) -> None:
    """DataError unless a record [tokens, layers, k] fits the trainer's model; a count that is not known is not checked."""
    if routes.ndim != 3 or (layers and routes.shape[1] != layers) or (k and routes.shape[2] != k):
        raise DataError(
            f"sample {number}: the engine's routing record has shape {list(routes.shape)}, and the checkpoint (config.json) has "
            f"{layers or '?'} mixture-of-experts layers with {k or '?'} experts a token; engine and trainer must run the same model"
        )
    if experts and routes.size and int(routes.max()) >= experts:
        raise DataError(
            f"sample {number}: the engine used expert {int(routes.max())}, and the checkpoint (config.json) has {experts}; "
            "engine and trainer must run the same model"
        )


def sampled(batch: Batch) -> bool:
    """Whether an engine produced these samples: supervised pairs (a warm start) have no routes to replay.

    Raises:
        PluginError: they were sampled and no routes came with them.
    """
    if ROUTES.name in batch.columns:
        return True
    if "rollout_log_probs" in batch.columns:
        raise PluginError(
            f"r3 has no routes to replay: sampled tokens came without {ROUTES.name}; the engine must record it for "
            "every request (a custom generate function must keep the fields of its responses)"
        )
    return False


def routes_of_rows(column: Tensor, rows: Tensor, experts: int = 0) -> tuple[Tensor, Tensor]:
    """Routes for the rows of one call.

    Rows without a record (the last token of a sample, padding) get k distinct experts, (row + arange(k)) mod E: valid,
    spread evenly, and without influence on any trained token.

    Args:
        column: [tokens, layers, k], -1 where nothing was recorded.
        rows: [physical rows] index into the column, -1 for padding.
        experts: E; 0 when it is not known.

    Returns:
        [physical rows, layers, k] int64, and [physical rows] bool: where there was a record.
    """
    routes = column[rows.clamp(min=0)].long()
    k = routes.shape[-1]
    recorded = (routes[:, 0, 0] >= 0) & (rows >= 0)
    experts = experts or max(int(column.max()) + 1, k)  # reading it waits for the device, which would then run dry
    start = torch.arange(len(rows), device=rows.device)[:, None]
    filler = (start + torch.arange(k, device=rows.device)) % experts
    return torch.where(recorded[:, None, None], routes, filler[:, None, :]), recorded


def disagreement(ctx: Context) -> dict[str, tuple[Tensor, Tensor]]:
    """How often the trainer's own top-k differs, as a set, from the replayed one: (number, out of how many) of tokens
    with any difference and of token-router pairs. Empty where this chunk has no router or nothing was replayed."""
    own: dict[int, Tensor] = ctx.attached.pop(OWN, {})
    if not own:
        return {}
    recorded = ctx.attached[RECORDED]
    layers = sorted(own)
    here = slice(layers[0], layers[-1] + 1) if layers[-1] - layers[0] < len(layers) else layers
    replayed = ctx.attached[REPLAY][:, here].unsqueeze(-2)
    mine = torch.stack([own[i] for i in layers], dim=1).unsqueeze(-1)
    # each names k different experts, so they are the same set when all of one are in the other
    differs = (mine != replayed).all(-1).any(-1) & recorded[:, None]
    tokens = recorded.sum()
    return {
        "r3/tokens_differing": (differs.any(-1).sum(), tokens),
        "r3/routers_differing": (differs.sum(), tokens * len(layers)),
    }
