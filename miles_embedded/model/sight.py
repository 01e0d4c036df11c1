"""What a layer's queries see beyond, or short of, "every key up to myself".

Three things occur in Transformers' families, and any layer may have any of them:

- a sliding window: a query sees the last ``window`` keys, itself included;
- sinks: a logit a head that takes part in the softmax and has no value, so that attention need not add up to one;
- a choice: an indexer names the keys of each query (``indexer``).

A layer with none of them has no ``Sight``, and a window that reaches over all keys of a call is none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad


@dataclass(frozen=True)
class Choice:
    """The keys an indexer chose. What ``masks`` is, is between the ``choose`` and the ``attend`` of one call; None: all keys."""

    masks: Any = None


@dataclass(frozen=True)
class Sight:
    """See the module's paragraph.

    Attributes:
        window: keys a query sees; 0 for all.
        sinks: [heads] logits.
        choice: chosen keys.
    """

    window: int = 0
    sinks: Tensor | None = None
    choice: Choice | None = None

    def within(self, longest: int) -> Sight | None:
        """What is left of it where no query has more than ``longest`` keys; None when nothing is."""
        window = self.window if self.window < longest else 0
        choice = self.choice if self.choice is not None and self.choice.masks is not None else None
        if self.sinks is None and not window and choice is None:
            return None
        return replace(self, window=window, choice=choice)


def sight_of(attention_mask: Tensor | None, options: dict[str, Any]) -> Sight | None:
    """From what a module hands its attention function: the mask, and its keyword arguments."""
    window = options.get("sliding_window") or (0 if attention_mask is None else int(attention_mask))
    sinks, choice = options.get("s_aux"), options.get("indices")
    if not window and sinks is None and choice is None:
        return None
    return Sight(window, sinks, choice)


@cache
def window_mask(window: int) -> Tensor:
    """Stands in for a sliding-window mask. Not every module tells its attention function the window, but every module
    gets a mask, so ours holds the one number that matters."""
    return torch.full((1, 1, 1, 1), window)


def causal(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """[queries, keys] True where a query sees a key; the last query is at the last key. ``window`` 0: all keys up to it."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen.triu_(keys - queries - window + 1) if window else seen


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sinks as one more key in front, so that any attention function can take them.

    The heads that share a key head have sinks of their own, so queries and keys get one more dimension for each of these heads: a query
    is 1 in the dimension of its head, and the added key holds that head's sink there. Its value is 0.

    Args:
        q: [n, heads, queries, dim].
        k: [n, kv heads, keys, dim].
        v: [n, kv heads, keys, width].
        mask: bool, [n or 1, 1, queries, keys].
        sinks: [heads].
        scaling: by which scores will be multiplied.

    Returns:
        q, k, v, mask with one more key, dimensions as above.
    """
    shared = q.shape[1] // k.shape[1]
    head = torch.arange(q.shape[1], device=q.device) % shared
    own = one_hot(head, shared).to(q.dtype)[None, :, None].expand(len(q), -1, q.shape[2], -1)
    key = pad((sinks / scaling).to(k.dtype).view(k.shape[1], 1, shared), (k.shape[3], 0))
    k = torch.cat([key.expand(len(k), -1, -1, -1), pad(k, (0, shared))], 2)
    return torch.cat([q, own], 3), k, pad(v, (0, 0, 1, 0)), pad(mask, (1, 0), value=True)
