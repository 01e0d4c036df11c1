"""What can draft."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn


class Draft(Protocol):
    """Predicts, from tokens and perhaps the hidden states of the tokens before them, what follows."""

    #: the model that it drafts for
    policy: Any

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its own, by name."""

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
        """[n, hidden] -> [n, vocab]; the policy's own parameters get no gradient from it."""
