"""Where r3 plugs in, whatever the backends: ask for routes, hand them to the forward, count disagreements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles_core.data.batch import Batch
from miles_core.plugin.hooks import hookimpl
from miles_core.train.trainer import Context, Output
from miles_r3 import ROUTES
from miles_r3.embedded import OWN, REPLAY


class R3:
    """Routing replay."""

    @hookimpl
    def on_request(self, request: Any) -> None:
        request.extras.add(ROUTES.name)

    @hookimpl
    def wrap_forward(self, run: Any) -> Any:
        experts = int(run.plan.fact("model.num_experts", 0))

        def wrap(inner: Any) -> Any:
            def forward(chunk: Any, micro_batch: Batch, ctx: Context) -> Output:
                # Supervised samples were written, not rolled out: they have no routes. A rollout sample without them was
                # refused when it was finished (the field is required).
                column = micro_batch.columns.get(ROUTES.name)
                if ctx.kind not in ("old", "train") or column is None:
                    return inner(chunk, micro_batch, ctx)
                ctx.state[REPLAY] = routes_of_rows(column, ctx.rows, experts)
                output = inner(chunk, micro_batch, ctx)
                if ctx.kind == "train":
                    ctx.metrics.update(differences(ctx))
                return output

            return forward

        return wrap


def routes_of_rows(column: Tensor, rows: Tensor, experts: int = 0) -> Tensor:
    """[tokens, layers, k] routes -> [physical rows, layers, k] int64 for the rows of this call.

    Padding (rows without a record) becomes k distinct experts, (row + arange(k)) mod E: valid, spread evenly, and without
    influence on any trained token.
    """
    routes = column[rows.clamp(min=0)].long()
    k = routes.shape[-1]
    missing = (routes[:, :1, :1] < 0) | (rows < 0)[:, None, None]
    if bool(missing.any()):
        experts = max(experts, int(column.max()) + 1, k)
        filler = (torch.arange(len(rows), device=rows.device)[:, None] + torch.arange(k, device=rows.device)) % experts
        routes = torch.where(missing, filler[:, None, :], routes)
    return routes


def differences(ctx: Context) -> dict[str, tuple[Tensor, Tensor]]:
    """How often the trainer's own top-k differs, as sets, from the replayed one: fraction of (token, layer) pairs and of
    tokens with any difference."""
    own = ctx.state.pop(OWN, None)
    if not own:
        return {}
    replayed = ctx.state[REPLAY].sort(-1).values
    mine = torch.stack([own[i] for i in sorted(own)], dim=1).sort(-1).values
    differs = (mine != replayed).any(-1)
    return {
        "r3/routers_differing": (differs.sum(), torch.tensor(differs.numel())),
        "r3/tokens_differing": (differs.any(-1).sum(), torch.tensor(len(differs))),
    }
