"""Training of a policy's draft: losses, running mean of the weights, and re-initialisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.data import Batch, WeightUnit
from miles_core.trainer import Context
from miles_embedded import OptimizerGroup, backbone, gather_tensor, optimizer_group, views
from miles_speculative.config import GROUP, MTP, SpeculativeConfig
from miles_speculative.draft import Draft
from miles_speculative.eagle import Eagle
from miles_speculative.head import Head, initialise
from miles_speculative.loss import cross_entropy, distance, divergence, entries

#: Weight of an EAGLE head's distance from the policy's hidden states, relative to the KL divergence (arXiv 2401.15077, section 4.2).
FEATURES = 10.0
#: Optimizer steps in which ``--draft-lr`` of an EAGLE head rises. A new head with the whole rate from the start diverges in the first steps at rates
#: that a warm-up makes stable.
WARMUP = 20
#: Key in ``Context.attached`` of a training pass: its call and its last hidden states.
SEEN = "speculative.seen"


class DraftTraining:
    """Trains the draft of one policy.

    Args:
        draft: draft of the trainer's model; must be attached before the optimizer is created.
        options: the plugin's options.
        temperature: sampling temperature of the rollout, also used for soft targets.
        first_seen: whether the engine's draft has an entry for the first token of a sequence, see ``Draft.HIDDEN``.
    """

    def __init__(self, draft: Draft, options: SpeculativeConfig, temperature: float, first_seen: bool = True) -> None:
        self.draft, self.options, self.temperature = draft, options, temperature or 1.0
        self.first_seen = first_seen or not draft.HIDDEN
        self.group = OptimizerGroup(GROUP, options.draft_lr, warmup=WARMUP if isinstance(draft, Eagle) else 0)
        optimizer_group(draft.parameters.values(), self.group)
        for parameter in draft.parameters.values():
            parameter.requires_grad_(options.trained)
        if options.trained:
            backbone(draft.policy).register_forward_hook(_record_hidden, with_kwargs=True)
        self.means: dict[str, Tensor] = {}
        if options.ema_decay:
            # unsharded on every rank, because a draft is small
            self.means = {name: p.detach().float().clone() for name, p in draft.parameters.items()}

    def losses(self, micro_batch: Batch, ctx: Context, step: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the losses for ``Output.aux``. Call it after the policy's forward. step: number of completed steps of the run."""
        seen = ctx.attached.pop(SEEN, None)
        interval = self.options.sft_interval
        soft = interval is not None and (step + 1) % interval == 0
        if seen is None or not (soft or self.options.mtp_training):
            return {}
        call, hidden = seen
        packing = ctx.attached["packing"]
        out = entries(self.draft, hidden, micro_batch.tokens, ctx, call, self.first_seen).index_select(
            0, packing.sources
        )
        count = torch.tensor(len(packing.targets))
        found = {}
        if self.options.mtp_training:
            total = cross_entropy(self.draft, out, micro_batch.tokens[packing.targets])
            found[MTP] = (self.options.mtp_loss_scaling_factor * total, count)
        if soft:
            policy = hidden.index_select(0, packing.sources)
            found["draft_kl"] = (divergence(self.draft, out, policy, self.temperature), count)
            if isinstance(self.draft, Eagle):
                found["draft_features"] = (FEATURES * distance(out, policy), count)
        return found

    @torch.no_grad()
    def update_means(self) -> None:
        """Update the running means after an optimizer step. A collective of all ranks."""
        if self.means:
            for name, parameter in self.draft.parameters.items():
                self.means[name].lerp_(gather_tensor(parameter).float(), 1 - self.options.ema_decay)

    @torch.no_grad()
    def renew(self) -> None:
        """Re-initialise the draft from the current policy and reset its moments. A collective of all ranks."""
        assert isinstance(self.draft, Head)  # a rule of the manifest
        initialise(self.draft.policy, self.draft.module)
        self.group.renewed = True
        if self.means:
            for name, parameter in self.draft.parameters.items():
                self.means[name].copy_(gather_tensor(parameter))

    @torch.no_grad()
    def substitute_means(self, units: Iterator[WeightUnit]) -> Iterator[WeightUnit]:
        """Yield the export stream with the draft's parameters replaced by their running means. Units that contain means are not ``lasting``:
        their tensors are views of copies, not of parameters."""
        policy_names = {id(p): name for name, p in self.draft.policy.named_parameters()}
        means = {}
        for name, parameter in self.draft.parameters.items():
            # with the parameter's strides, because the exported tensors are views of it
            mean = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
            )
            means[policy_names[id(parameter)]] = mean.copy_(self.means[name])
        replaced = {view.name: view for view in views(self.draft.policy) if view.source in means}
        for unit in units:
            tensors = {
                name: replaced[name].of(means[replaced[name].source]) if name in replaced else tensor
                for name, tensor in unit.tensors.items()
            }
            yield replace(unit, tensors=tensors, lasting=unit.lasting and replaced.keys().isdisjoint(tensors))


def _record_hidden(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    call = kwargs.get("call")
    if call is not None and call.ctx.kind == "train":
        call.ctx.attached[SEEN] = (call, output.last_hidden_state[0].detach())
