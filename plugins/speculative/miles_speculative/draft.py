"""The interface of drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from miles_embedded import logits_of


class Draft(ABC):
    """Predicts the next tokens from tokens and, optionally, the policy's hidden states.

    Args:
        policy: the model to draft for, prepared by the backend.
        module: the draft's module, a submodule of ``policy``.

    Attributes:
        HIDDEN: whether it reads hidden states. The first token of a sequence has no previous hidden state. The embedded engine gives it an
            entry with a zero state in the draft's cache. SGLang has no entry for it, so a draft that learned to attend to this entry (as
            to an attention sink) drafts badly there, and must be trained without it.
    """

    HIDDEN: ClassVar[bool] = True

    def __init__(self, policy: Any, module: Any) -> None:
        self.policy, self.module = policy, module

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The draft's parameters by their names in ``module``."""
        return dict(self.module.named_parameters())

    @abstractmethod
    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, call: Any) -> Tensor:
        """Process tokens.

        Args:
            tokens: [n] token ids.
            hidden: [n, hidden] the hidden state of the previous token: the policy's after its last norm, or this method's output.
            positions: [n] positions of the tokens.
            call: the backend's call, with the rows of the tokens.

        Returns:
            [n, hidden], the input of ``logits``.
        """

    def logits(self, out: Tensor) -> Tensor:
        """Compute [n, vocab] logits of the next tokens from [n, hidden], by default with the policy's output layer, detached."""
        if not out.requires_grad:
            return logits_of(self.policy, out)
        top = self.policy.get_output_embeddings()
        frozen = {name: p.detach() for name, p in top.named_parameters()}
        logits: Tensor = torch.func.functional_call(top, frozen, (out,))
        return logits
