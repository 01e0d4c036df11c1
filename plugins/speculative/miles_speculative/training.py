"""The draft of one policy while it is trained: its losses, its running mean, and a new start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles_core import Batch, ConfigError, Context, Unit
from miles_embedded import OptimizerGroup, backbone, optimizer_group
from miles_speculative.config import SpeculativeConfig
from miles_speculative.draft import Draft
from miles_speculative.eagle import Eagle
from miles_speculative.head import Head, initialise
from miles_speculative.loss import cross_entropy, distance, divergence, entries

#: What an EAGLE head's distance from the policy's hidden states counts beside the distributions' (arXiv 2401.15077, section 4.2).
_FEATURES = 10.0
#: In ``Context.attached`` of a training pass: its call and its last hidden states.
SEEN = "speculative.seen"


class DraftTraining:
    """Args:
    draft: in the trainer's model, which is not yet in an optimiser.
    options: see ``SpeculativeConfig``.
    temperature: of the rollout; soft targets are those of the distribution that drafts will meet.
    """

    def __init__(self, draft: Draft, options: SpeculativeConfig, temperature: float) -> None:
        self.draft, self.options, self.temperature = draft, options, temperature or 1.0
        self.group = OptimizerGroup("draft", options.draft_lr)
        optimizer_group(draft.parameters.values(), self.group)
        for parameter in draft.parameters.values():
            parameter.requires_grad_(options.trained)
        if options.trained:
            backbone(draft.policy).register_forward_hook(_see, with_kwargs=True)
        self.means: dict[str, Tensor] = {}
        if options.ema_decay:
            self.means = {name: p.detach().float().clone() for name, p in draft.parameters.items()}

    def losses(self, micro_batch: Batch, ctx: Context, step: int) -> dict[str, tuple[Tensor, Tensor]]:
        """As ``Output.aux`` wants them, after the policy's own forward; ``step``: completed steps of the run."""
        seen = ctx.attached.pop(SEEN, None)
        interval = self.options.sft_interval
        soft = interval is not None and (step + 1) % interval == 0
        if seen is None or not (soft or self.options.mtp_training):
            return {}
        call, hidden = seen
        packing = ctx.attached["packing"]
        out = entries(self.draft, hidden, micro_batch.tokens, ctx, call).index_select(0, packing.sources)
        count = torch.tensor(len(packing.targets))
        found = {}
        if self.options.mtp_training:
            total = cross_entropy(self.draft, out, micro_batch.tokens[packing.targets])
            found["mtp"] = (self.options.mtp_loss_scaling_factor * total, count)
        if soft:
            policy = hidden.index_select(0, packing.sources)
            found["draft_kl"] = (divergence(self.draft, out, policy, self.temperature), count)
            if isinstance(self.draft, Eagle):
                found["draft_features"] = (_FEATURES * distance(out, policy), count)
        return found

    @torch.no_grad()
    def stepped(self) -> None:
        """An optimiser step was made."""
        for name, mean in self.means.items():
            mean.lerp_(self.draft.parameters[name].detach().float(), 1 - self.options.ema_decay)

    @torch.no_grad()
    def renew(self) -> None:
        """Start again from the policy as it is now, without moments."""
        assert isinstance(self.draft, Head)  # a rule of the manifest
        initialise(self.draft.policy, self.draft.layer)
        self.group.renewed = True
        for name, mean in self.means.items():
            mean.copy_(self.draft.parameters[name])

    def averaged(self, units: Iterator[Unit]) -> Iterator[Unit]:
        """The export stream with the running means in place of the draft's parameters."""
        means = {p.untyped_storage().data_ptr(): self.means[name] for name, p in self.draft.parameters.items()}

        def mean_of(tensor: Tensor) -> Tensor:
            mean = means.get(tensor.untyped_storage().data_ptr())
            if mean is None:
                return tensor
            return mean.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).to(tensor.dtype)

        for unit in units:
            yield Unit({name: mean_of(tensor) for name, tensor in unit.tensors.items()})


def check_ranks(options: SpeculativeConfig, strategy: str) -> None:
    """Refuse what works on whole weights where ``strategy`` divides them among several ranks; ConfigError."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and strategy == "full_shard" and (options.ema_decay or options.reinit_interval):
        raise ConfigError(
            f"--draft-ema-decay and --reinit-draft-interval work on whole weights, and --sharding-strategy full_shard divides them among "
            f"{ranks} ranks: add --sharding-strategy no_shard"
        )


def _see(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    call = kwargs.get("call")
    if call is not None and call.ctx.kind == "train":
        call.ctx.attached[SEEN] = (call, output.last_hidden_state[0].detach())
