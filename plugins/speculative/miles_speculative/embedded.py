"""Where speculative plugs into the embedded backend: the layer in every model, its loss in the policy's backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles_core import Batch, Context, Output, hookimpl
from miles_embedded import OptimizerGroup, backbone, is_embedded, optimizer_group
from miles_speculative.config import SpeculativeConfig
from miles_speculative.head import attach, head_of
from miles_speculative.loss import cross_entropy, entries

#: In ``Context.attached`` of a training pass: its call and its last hidden states.
SEEN = "speculative.seen"


class EmbeddedSpeculative:
    """The draft's layer, and its training."""

    def __init__(self, options: SpeculativeConfig) -> None:
        self.options = options

    @hookimpl
    def on_model(self, run: Any, policy: Any, model: nn.Module, role: str) -> None:
        if role not in ("train", "rollout", "shared") or not is_embedded(model):
            return
        head = attach(model, run.config.model.ref_load or policy.hf_checkpoint or run.config.model.hf_checkpoint)
        if role == "rollout":
            return
        group = OptimizerGroup("draft", self.options.draft_lr, clip_grad=1.0)
        optimizer_group(head.parameters.values(), group)
        if self.options.mtp_training:
            backbone(model).register_forward_hook(_see, with_kwargs=True)
        else:
            for parameter in head.parameters.values():
                parameter.requires_grad_(False)

    @hookimpl
    def wrap_forward(self) -> Any:
        if not self.options.mtp_training:
            return None

        def wrap(inner: Any) -> Any:
            def forward(chunk: Any, micro_batch: Batch, ctx: Context) -> Output:
                output: Output = inner(chunk, micro_batch, ctx)
                seen = ctx.attached.pop(SEEN, None)
                if seen is not None:
                    output.aux["mtp"] = self._loss(chunk, micro_batch, ctx, *seen)
                return output

            return forward

        return wrap

    def _loss(self, chunk: Any, micro_batch: Batch, ctx: Context, call: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        packing = ctx.attached["packing"]
        head = head_of(chunk)
        out = entries(head, hidden, micro_batch.tokens, ctx, call).index_select(0, packing.sources)
        total = cross_entropy(head, out, micro_batch.tokens[packing.targets])
        return self.options.mtp_loss_scaling_factor * total, torch.tensor(len(packing.targets))


def _see(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    call = kwargs.get("call")
    if call is not None and call.ctx.kind == "train":
        call.ctx.attached[SEEN] = (call, output.last_hidden_state[0].detach())
