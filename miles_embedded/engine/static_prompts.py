"""A pass over packed prompts in static buffers, which reads no numbers from the host.

The numbers of tokens and prompts and the length of the longest prompt are rounded up, so that few shapes serve prompts of all lengths. The
padding tokens form one more prompt, which is stored in a free slot of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_core.contracts.trainer import Context
from miles_embedded.engine.cache import Cache
from miles_embedded.engine.runner import Runner
from miles_embedded.engine.static_attention import CannotBeStatic, DeviceCall
from miles_embedded.engine.store import round_up
from miles_embedded.model.attention import AttentionOptions, attend_padded
from miles_embedded.model.flash import Sequences, flash_forward, flash_supports, pad_heads

#: Most tokens of a pass, padding included.
MOST_TOKENS = 8192
#: Most tokens of a pass whose attention needs a mask [tokens, tokens].
_MOST_MASKED = 1024


class TooManyTokens(CannotBeStatic):
    """Raised if a pass with fewer tokens would be possible."""


@dataclass(frozen=True)
class PromptShape:
    """Properties that require a separate recording of a pass.

    Attributes:
        tokens: of all prompts, padding included.
        prompts: bound on the number of prompts, that of the padding included.
        longest: bound on the length of a prompt.
        names: recorded fields to keep if modules record them.
    """

    tokens: int
    prompts: int
    longest: int
    names: frozenset[str] = frozenset()

    @staticmethod
    def of(lengths: Sequence[int], names: Set[str]) -> PromptShape:
        """Return the smallest shape for prompts of these lengths."""
        tokens = padded_tokens(sum(lengths))
        longest = max(*lengths, tokens // 4, 16)  # at least the padding
        return PromptShape(tokens, _power_of_two(len(lengths) + 1), _power_of_two(longest), frozenset(names))


def padded_tokens(count: int) -> int:
    """Round up a number of tokens to a multiple of 16, and of an eighth of the next power of two: at most a quarter is added to many tokens."""
    return round_up(count, max(16, _power_of_two(count) // 8))


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


class PromptBatch:
    """Inputs of a pass in buffers with fixed addresses.

    Attributes:
        tokens: [MOST_TOKENS] int64 ids.
        positions: [MOST_TOKENS] int64, index of each token in its prompt.
        slots: [MOST_TOKENS] int64, cache slot of each token's prompt.
        columns: [MOST_TOKENS] int64, where the token is stored in the slot.
        variants: [MOST_TOKENS] int64, variant of the model of each token's prompt; 0 for the padding.
        bounds: [prompts + 1] int32, where each prompt starts, and the end of the last one. Unused prompts are empty.
        last: [prompts] int64, the last token of each prompt; 0 for the padding.
    """

    def __init__(self, device: torch.device) -> None:
        self._integers = torch.zeros(5, MOST_TOKENS, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.slots, self.columns, self.variants = self._integers
        prompts = _power_of_two(MOST_TOKENS + 1)
        self.bounds = torch.zeros(prompts + 1, dtype=torch.int32, device=device)
        self.last = torch.zeros(prompts, dtype=torch.int64, device=device)

    def fill(
        self,
        sequences: Sequence[Sequence[int]],
        slots: np.ndarray,
        free: int,
        shape: PromptShape,
        variants: Sequence[int],
    ) -> None:
        """Write prompts with their cache slots and variants; the tokens of the padding are stored in slot ``free``, in as many columns as
        the longest prompt needs."""
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        count = int(lengths.sum())
        integers = np.zeros((5, shape.tokens), np.int64)
        padding = np.arange(shape.tokens - count)
        integers[0, :count] = np.concatenate([np.asarray(s, np.int64) for s in sequences])
        integers[1] = np.concatenate([*(np.arange(n) for n in lengths), padding])
        integers[2] = np.concatenate([np.repeat(slots, lengths), np.full(len(padding), free)])
        integers[3] = integers[1]
        integers[3, count:] %= lengths.max()
        integers[4, :count] = np.repeat(variants, lengths)
        bounds = np.full(shape.prompts + 1, shape.tokens, np.int32)
        bounds[: len(lengths) + 1] = np.concatenate([[0], lengths.cumsum()])
        last = np.zeros(shape.prompts, np.int64)
        last[: len(lengths)] = lengths.cumsum() - 1
        buffers = self._integers[:, : shape.tokens], self.bounds[: len(bounds)], self.last[: len(last)]
        for buffer, values in zip(buffers, (integers, bounds, last), strict=True):
            buffer.copy_(torch.from_numpy(values), non_blocking=True)  # a step of the rows may be in flight


class StaticPromptCall(DeviceCall):
    """A call over the prompts of a ``PromptBatch``; see ``miles_embedded.model.call.Call``.

    Attributes:
        positions: [tokens] index of each token in its prompt.
        bounds: [prompts + 1] int32, where each prompt starts, and the end of the last one. Unused prompts are empty.
    """

    def __init__(self, ctx: Context, cache: Cache, batch: PromptBatch, shape: PromptShape) -> None:
        self.ctx, self.store, self.longest = ctx, cache.prefixes, shape.longest
        self.positions, self.slots, self.columns = (
            x[: shape.tokens] for x in (batch.positions, batch.slots, batch.columns)
        )
        self.bounds = batch.bounds[: shape.prompts + 1]
        self._sequences = Sequences(self.bounds, self.bounds, shape.longest, shape.longest, causal=True)

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """See ``Call.attend``."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        self.keep("k", module.layer_idx, k)
        self.keep("v", module.layer_idx, v)
        if options is None and _runs_flash(query):
            return flash_forward(*pad_heads(q, k, v), self._sequences, scaling)[0][None, ..., : v.shape[-1]]
        if len(q) > _MOST_MASKED:
            raise TooManyTokens(f"attention with a mask over more than {_MOST_MASKED} tokens")
        grouped = query.shape[1] != key.shape[1]
        out = attend_padded(query, key, value, self._mask(options), scaling, grouped, options)
        return out.transpose(1, 2)

    def keep(self, kind: str, layer: int, entries: Tensor) -> None:
        """Store a layer's keys (``kind`` "k") or values ("v"), [tokens, heads, dim], in the cache."""
        self.write(self.store.slab((kind, layer), entries.shape[1], entries.shape[2:], entries), entries)

    def _mask(self, options: AttentionOptions | None) -> Tensor:
        """[1, 1, tokens, tokens] True where the query (row) attends to the key (column): tokens with the same slot belong to one prompt."""
        seen = (options or AttentionOptions()).sees(self.positions[:, None], self.positions)
        return (seen & (self.slots[:, None] == self.slots))[None, None]


def _runs_flash(query: Tensor) -> bool:
    return query.is_cuda and flash_supports(query)


class StaticPrompts:
    """A pass of ``runner``'s model over ``batch``.

    Attributes:
        recorded: shape -> names of the fields that modules recorded.
    """

    def __init__(self, runner: Runner, batch: PromptBatch) -> None:
        self.runner, self.batch = runner, batch
        self.recorded: dict[PromptShape, set[str]] = {}

    @torch.no_grad()
    def __call__(self, shape: PromptShape) -> Tensor:
        """Compute the prompts and store them in the cache; returns the hidden states of their last tokens [prompts, hidden]."""
        runner, batch = self.runner, self.batch
        ctx = runner.context(shape.tokens, batch.variants[: shape.tokens])
        call = StaticPromptCall(ctx, runner.cache, batch, shape)
        hidden = runner.run(batch.tokens[: shape.tokens], call.positions, call)
        self.recorded[shape] = call.keep_recorded(shape.names)
        return hidden.index_select(0, batch.last[: shape.prompts])
