"""Hooks of the plugin: request routes, pass them to the trainer's forward, count disagreements, and hook the embedded backend's modules.

Other trainers read the routes from ``ctx.attached`` (``miles_core.trainer.GIVEN_ROUTES``) and must store their own choices there. A forward
pass without own choices did not replay the routes, and stops the run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.data import Batch, Sample
from miles_core.plugin import DataError, PluginError, Policy, hookimpl
from miles_core.trainer import Context, Output
from miles_embedded import is_embedded
from miles_r3 import ROUTES, index_dtype
from miles_r3.config import R3Config
from miles_r3.embedded import OWN, RECORDED, REPLAY, tap
from miles_r3.spill import RouteBuffer

#: Kinds of passes that replay routes: passes of the policy over sampled tokens. Reference, teacher and critic models use their own routes.
REPLAYED = ("old", "train", "verify")


class R3:
    """Routing replay."""

    def __init__(self, options: R3Config) -> None:
        self.options = options
        self.buffer: RouteBuffer | None = None
        self.counts: tuple[int | None, ...] = ()
        self.field = ROUTES
        self._reported = 0

    @hookimpl
    def on_start(self, run: Any) -> None:
        """Declare which routes of a continued response count, and the smallest dtype that holds the model's expert indices: their columns are
        written, cut and copied to the GPU."""
        dtype = index_dtype(run.plan.fact("model.num_experts", None) or 0)
        self.field = replace(ROUTES, dtype=dtype, newest=self.options.recomputed == "newest")
        run.fields = tuple(self.field if spec == ROUTES else spec for spec in run.fields)

    @hookimpl
    def on_model(self, policy: Policy, model: nn.Module, role: str) -> None:
        tapped = ("rollout", "train", "shared", *(("ref",) if self.options.deterministic else ()))
        if has_routes(policy) and role in tapped and is_embedded(model):
            tap(model, self.options.deterministic)

    @hookimpl
    def on_sample(self, run: Any, sample: Sample) -> None:
        routes = sample.fields.get(ROUTES.name)
        if routes is None:
            return
        routes = np.asarray(routes)
        if self.buffer is None:
            self.buffer = RouteBuffer(run.directory / "routes", self.options.buffer_size)
            # computed once, because this hook runs for every sample
            self.counts = tuple(run.plan.fact(f"model.{n}", None) for n in ("num_experts", "moe_layers", "top_k"))
        check_routes(sample.index, routes, *self.counts)
        routes = routes.astype(self.field.dtype, copy=False)
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
        if not has_routes(policy):
            return None
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
                        f"r3: {type(chunk).__name__} of --trainer {run.config.run.trainer} did not use the routes of the rollout, so it "
                        "would train with its own routes; the trainer declares routing_replay but does not replay: run without r3, or "
                        "with --trainer embedded"
                    )
                if ctx.kind == "train":
                    ctx.metrics.update(disagreement(ctx))
                return output

            return forward

        return wrap


def has_routes(policy: Policy) -> bool:
    """Whether samples hold routes of this model's routers: a critic or a teacher, which may be dense, reads those of another model. A policy
    that trains on recorded samples has no engine, but an engine with its weights made the samples."""
    return policy.role == "train" or bool(policy.generates)


def check_routes(number: int, routes: np.ndarray, experts: int | None, layers: int | None, k: int | None) -> None:
    """Check that a record [tokens, layers, k] fits the trainer's model; None skips a check.

    Raises:
        DataError: the shape or an expert index does not fit."""
    if routes.ndim != 3 or (layers and routes.shape[1] != layers) or (k and routes.shape[2] != k):
        raise DataError(
            f"sample {number}: the engine's routing record has shape {list(routes.shape)}, but the checkpoint (config.json) has "
            f"{layers or '?'} mixture-of-experts layers with {k or '?'} experts per token; engine and trainer must run the same model"
        )
    if not experts or not routes.size:
        return
    lowest, highest = int(routes.min()), int(routes.max())
    if highest >= experts or lowest < -1:  # an index above 127 is negative in a column of int8
        raise DataError(
            f"sample {number}: the engine used expert {highest if highest >= experts else lowest % 256}, but the checkpoint (config.json) "
            f"has {experts} experts; engine and trainer must run the same model"
        )


def sampled(batch: Batch) -> bool:
    """Whether an engine sampled this batch. Supervised pairs (warm start) have no routes to replay.

    Raises:
        PluginError: the tokens were sampled, but have no routes.
    """
    if ROUTES.name in batch.columns:
        return True
    if "rollout_log_probs" in batch.columns:
        raise PluginError(
            f"r3 has no routes to replay: sampled tokens have no {ROUTES.name}; the engine must record it for every request (a "
            "custom generate function must keep the fields of its responses)"
        )
    return False


def routes_of_rows(column: Tensor, rows: Tensor, experts: int = 0) -> tuple[Tensor, Tensor]:
    """Return the routes for the rows of one call.

    Rows without a record (the last token of a sample, padding) get k distinct experts, (row + arange(k)) mod E: valid, evenly distributed,
    and without influence on trained tokens.

    Args:
        column: [tokens, layers, k], -1 for tokens without a record.
        rows: [physical rows] index into the column, -1 for padding.
        experts: number of experts E; 0 if unknown.

    Returns:
        routes [physical rows, layers, k] int64, in which the rows of each layer are contiguous, and a mask [physical rows] bool of rows
        with a record.
    """
    if not len(column):  # a rank without samples computes a row of padding
        column = column.new_full((1, *column.shape[1:]), -1)
    given = column.index_select(0, rows.clamp(min=0)).transpose(0, 1)
    k = given.shape[-1]
    recorded = (given[0, :, 0] >= 0) & (rows >= 0)
    experts = experts or max(int(column.max()) + 1, k)  # fallback only: the maximum needs a device synchronisation
    start = torch.arange(len(rows), device=rows.device)[:, None]
    filler = (start + torch.arange(k, device=rows.device)) % experts
    routes = torch.empty(given.shape, dtype=torch.int64, device=given.device)
    torch.where(recorded[:, None], given, filler, out=routes)
    return routes.transpose(0, 1), recorded


def disagreement(ctx: Context) -> dict[str, tuple[Tensor, Tensor]]:
    """Count how often the trainer's own top-k set differs from the replayed set.

    Returns (count, total) pairs for tokens with any difference and for token-router pairs; empty if this chunk has no router or replayed
    nothing."""
    own: dict[int, Tensor] = ctx.attached.pop(OWN, {})
    if not own:
        return {}
    recorded = ctx.attached[RECORDED]
    layers = sorted(own)
    here = slice(layers[0], layers[-1] + 1) if layers[-1] - layers[0] < len(layers) else layers
    replayed = ctx.attached[REPLAY][:, here].unsqueeze(-2)
    mine = torch.stack([own[i] for i in layers], dim=1).unsqueeze(-1)
    # both have k distinct experts, so the sets are equal if one contains each expert of the other
    differs = (mine != replayed).all(-1).any(-1) & recorded[:, None]
    tokens = recorded.sum()
    return {
        "r3/tokens_differing": (differs.any(-1).sum(), tokens),
        "r3/routers_differing": (differs.sum(), tokens * len(layers)),
    }
