"""What can draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded import logits_of


class Draft(ABC):
    """Predicts, from tokens and perhaps the hidden states of the tokens before them, what follows.

    Args:
        policy: the model that it drafts for, prepared by the backend, of which ``module`` is a part.
        module: what it drafts with.
    """

    def __init__(self, policy: Any, module: Any) -> None:
        self.policy, self.module = policy, module

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its own, by their names in the module."""
        return dict(self.module.named_parameters())

    @abstractmethod
    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, call: Any) -> Tensor:
        """One entry each.

        Args:
            tokens: [n] ids.
            hidden: [n, hidden] of the token before each, after the policy's last norm; or what this returned for it.
            positions: [n] of the tokens.
            call: whose rows they are.

        Returns:
            [n, hidden], from which ``logits`` predicts what follows each token.
        """

    def logits(self, out: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab], by the policy's head unless a draft has its own; the policy's parameters get no gradient from it."""
        if not out.requires_grad:
            return logits_of(self.policy, out)
        top = self.policy.get_output_embeddings()
        frozen = {name: p.detach() for name, p in top.named_parameters()}
        logits: Tensor = torch.func.functional_call(top, frozen, (out,))
        return logits
