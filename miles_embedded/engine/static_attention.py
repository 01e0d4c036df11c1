"""Attention of a decode step with shapes that depend on the capacity of the cache only, as a CUDA graph requires.

Row lengths and the mask are computed on the device. On a GPU a Triton kernel (``attention_kernel``) reads the valid tokens; the
torch implementation reads the whole capacity and serves as the reference of the kernel.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from miles_core.contracts.trainer import Context
from miles_embedded.engine.attention import advance_rows, product
from miles_embedded.engine.cache import Cache
from miles_embedded.engine.runner import field_slab
from miles_embedded.engine.static_batch import StaticBatch
from miles_embedded.engine.store import VERSIONS, Store
from miles_embedded.kernels.available import kernels_run
from miles_embedded.model.attention import AttentionOptions, ChosenKeys
from miles_embedded.model.indexer import Indexed
from miles_embedded.model.row_readers import find_epilogue
from miles_embedded.model.states import Advance

#: Largest head dimension that the kernel supports.
_WIDEST = 256


class CannotBeStatic(Exception):
    """Raised if a step depends on data outside the static buffers; the message names it."""


class DeviceCall:
    """A call whose lengths are known on the device only.

    Attributes:
        ctx: context of this call.
        store: of the cache; receives the entries of the fed tokens.
        slots, columns: [tokens] where the fed tokens are stored.
    """

    ctx: Context
    store: Store
    slots: Tensor
    columns: Tensor

    @property
    def spans(self) -> Any:
        """See ``Call.spans``."""
        raise CannotBeStatic("its rotary frequencies depend on the length of each sequence (longrope)")

    def choose(self, indexed: Indexed) -> ChosenKeys:
        """See ``Call.choose``."""
        raise CannotBeStatic("an indexer chooses the keys of its attention")

    def advance(self, module: Any, hidden: Tensor, compute: Advance) -> Tensor:
        """See ``Call.advance``."""
        raise CannotBeStatic("its layers keep a state between tokens, which ends at the last token of each sequence")

    def write(self, slab: Tensor, entries: Tensor) -> None:
        """Store the fed tokens' entries [tokens, heads, ...] in ``slab`` of the store."""
        slab[self.slots, :, self.columns] = entries

    def keep_recorded(self, names: Set[str]) -> set[str]:
        """Store the fields ``names`` that modules recorded for the fed tokens; returns those."""
        kept = set(names & self.ctx.extras.keys())
        for name in kept:
            recorded = self.ctx.extras[name]
            self.write(field_slab(self.store, name, recorded), recorded.unsqueeze(1))
        return kept


class StaticCall(DeviceCall):
    """A call that feeds ``queries`` tokens to each of the first ``count`` rows of a ``StaticBatch``, row by row.

    Args:
        ctx: context of this call.
        cache: cache with at least ``count`` slots and room for the fed tokens in each.
        batch: the rows.
        count: number of rows, padding included.
        queries: tokens fed to each row.
        lengths: [count] own tokens in front of the fed ones, on the device; those of the batch by default.

    Attributes:
        slots, columns: [count * queries] where the fed tokens are stored among the own tokens.
        positions: [count * queries] index of each fed token in its sequence.
    """

    def __init__(
        self,
        ctx: Context,
        cache: Cache,
        batch: StaticBatch,
        count: int,
        queries: int = 1,
        lengths: Tensor | None = None,
    ) -> None:
        self.ctx, self.cache, self.store, self.count, self.queries = ctx, cache, cache.own, count, queries
        self.lengths = batch.lengths[:count] if lengths is None else lengths
        self.prompt_lengths, self.prompt_slots = batch.prompt_lengths[:count], batch.prompt_slots[:count]
        self.slots, self.columns = batch.index[:count], self.lengths
        if queries > 1:
            self.slots = self.per_token(self.slots)
            self.columns = (self.lengths[:, None] + torch.arange(queries, device=self.lengths.device)).flatten()
        self.positions = self.per_token(self.prompt_lengths) + self.columns
        self._hidden: dict[tuple[int, int], Tensor] = {}

    @property
    def longest(self) -> int:
        """Number of keys that fit in the cache, an upper bound for every row."""
        return self.cache.prefixes.width + self.cache.own.width

    def per_token(self, values: Tensor) -> Tensor:
        """Repeat a value of each row for each of its fed tokens: [count] -> [count * queries]."""
        return values if self.queries == 1 else values[:, None].expand(-1, self.queries).reshape(-1)

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
        q = query[0].transpose(0, 1)
        if _kernels_support(q, key, value):
            from miles_embedded.engine.attention_kernel import attend_rows

            keys, values = self.slabs("k", module.layer_idx, key), self.slabs("v", module.layer_idx, value)
            epilogue = find_epilogue(module, (len(q), q.shape[1] * value.shape[3]), value.dtype)
            return attend_rows(q.contiguous(), keys, values, self, scaling, options, epilogue, (key, value))[None]
        keys, values = self.append(module.layer_idx, key, value)
        return self._attend_with_torch(q, keys, values, scaling, options)[None]

    def advance(self, module: Any, hidden: Tensor, compute: Advance) -> Tensor:
        """See ``Call.advance``."""
        if self.queries > 1:
            return super().advance(module, hidden, compute)
        first = self.slots * VERSIONS
        before, after = (first + n % VERSIONS for n in (self.lengths, self.lengths + 1))
        return advance_rows(self.cache, before, after, module, hidden, compute)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Store the fed tokens' keys and values of a layer, [1, heads, count * queries, dim] each; on a GPU in one launch.

        Returns:
            slabs of the prompts and of the rows, for keys and for values.
        """
        keys, values = self.slabs("k", layer, key), self.slabs("v", layer, value)
        if key.is_cuda and key.stride(3) == value.stride(3) == 1 and kernels_run(key.device):
            from miles_embedded.engine.attention_kernel import append_rows

            append_rows(key, value, keys[1], values[1], self.lengths, self.queries)
        else:
            self.write(keys[1], key[0].transpose(0, 1))
            self.write(values[1], value[0].transpose(0, 1))
        return keys, values

    def slabs(self, kind: str, layer: int, fed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slabs of the prompts and of the rows for the fed tokens' keys or values [1, heads, count * queries, dim]."""
        stores = self.cache.prefixes, self.cache.own
        prompts, own = (store.slab((kind, layer), fed.shape[1], fed.shape[3:], fed) for store in stores)
        return prompts, own

    def _attend_with_torch(
        self,
        q: Tensor,
        keys: tuple[Tensor, Tensor],
        values: tuple[Tensor, Tensor],
        scaling: float,
        options: AttentionOptions | None,
    ) -> Tensor:
        """Attend q [count * queries, heads, dim] -> [count * queries, heads, value dim]; scores and softmax are float32."""
        options = options or AttentionOptions()
        k, v = (torch.cat([p.index_select(0, self.prompt_slots), o[: self.count]], 2) for p, o in (keys, values))
        rows, kv_heads, width, dim = k.shape
        # One matrix per (row, kv head). Its rows are the row's queries for each query head of the kv head.
        q = q.view(rows, self.queries, kv_heads, -1, dim).transpose(1, 2)
        scores = product(q.reshape(rows * kv_heads, -1, dim), k.flatten(0, 1).transpose(1, 2)) * scaling
        if options.cap:
            scores = torch.tanh(scores / options.cap) * options.cap
        scores = scores.view(rows, kv_heads, self.queries, -1, width)
        scores = scores.masked_fill(self._find_hidden(options)[:, None, :, None], -torch.inf)
        if options.sinks is not None:
            sinks = options.sinks.to(scores.dtype).view(1, kv_heads, 1, -1, 1)
            scores = torch.cat([scores, sinks.expand(rows, -1, self.queries, -1, -1)], -1)
        weights = scores.softmax(-1)[..., :width].to(v.dtype).reshape(rows * kv_heads, -1, width)
        out = product(weights, v.flatten(0, 1)).view(rows, kv_heads, self.queries, -1, v.shape[3]).transpose(1, 2)
        return out.reshape(rows * self.queries, -1, v.shape[3]).to(v.dtype)

    def _find_hidden(self, options: AttentionOptions) -> Tensor:
        """[count, queries, prompt width + own width] True for columns that a query does not attend to."""
        if options.hides not in self._hidden:
            device, prompt = self.positions.device, self.prompt_lengths[:, None, None]
            column = torch.arange(self.cache.prefixes.width, device=device)
            own = prompt + torch.arange(self.cache.own.width, device=device)
            query = self.positions.view(self.count, self.queries, 1)
            seen = [(column < prompt) & options.sees(query, column), options.sees(query, own)]
            self._hidden[options.hides] = ~torch.cat(seen, 2)
        return self._hidden[options.hides]


def _kernels_support(q: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels support these tensors."""
    dtypes = (torch.bfloat16, torch.float16)  # float32 takes more shared memory than a GPU has
    inner = key.stride(3) == value.stride(3) == 1
    return (
        q.is_cuda
        and inner
        and q.dtype in dtypes
        and max(q.shape[-1], value.shape[-1]) <= _WIDEST
        and kernels_run(q.device)
    )
