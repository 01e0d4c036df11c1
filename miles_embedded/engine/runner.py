"""Run the model over cached rows: computes prompts, feeds tokens, returns logits. Independent of requests and sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context
from miles_core.errors import MilesError
from miles_embedded.engine.attention import DecodeCall, PromptCall, Prompts
from miles_embedded.engine.cache import Cache, CachedRows
from miles_embedded.engine.store import Store, to_device
from miles_embedded.model.call import Call
from miles_embedded.model.growing_rope import rope_switch
from miles_embedded.model.image_processor import ImageProcessor
from miles_embedded.model.kv_dtype import KV_DTYPE, check_kv_dtype
from miles_embedded.model.logprobs import logits_of
from miles_embedded.model.operations import divide_by_temperature, operations_of
from miles_embedded.model.parts import backbone, decoder_layers, head
from miles_embedded.model.variants import VARIANTS, TokenVariants, VariantParts
from miles_embedded.model.vision import Item, Vision
from miles_embedded.model.windows import mask_for

#: Logits (rows * vocabulary) computed at once when scoring.
_LOGITS = 1 << 26
#: Largest number of tokens, padding included, of sequences computed in one call.
_TOKENS = 16384


@dataclass
class ForwardResult:
    """Output of the model for the tokens of one call.

    Attributes:
        hidden: [tokens, hidden] after the last norm.
        head: hidden states -> logits.
    """

    hidden: Tensor
    head: Callable[[Tensor], Tensor]

    @cached_property
    def logits(self) -> Tensor:
        """[tokens, vocab] logits in the model's type."""
        return self.head(self.hidden)


def move_items(items: list, where: np.ndarray, sources: np.ndarray, size: int) -> None:
    """Apply slot moves to ``items``, a list with one object per slot, and update their ``slot`` attributes."""
    for to, source in zip(where.tolist(), sources.tolist(), strict=True):
        items[to] = items[source]
        items[to].slot = to
    del items[size:]


class Runner:
    """A model with the KV cache of its rows.

    Args:
        model: the model.
        kv_dtype: round keys and values as a cache of this type would; "" keeps the model's type.
        processor: the model's image processor; None if prompts are text.

    Attributes:
        switch: length at which rotary frequencies change, see ``rope_switch``.
        parts: the parts of all variants of the model; None for a model without variants, whose calls then carry none.
    """

    def __init__(self, model: nn.Module, kv_dtype: str = "", processor: ImageProcessor | None = None) -> None:
        self.kv_dtype = check_kv_dtype(kv_dtype)
        self.model, self.backbone = model, backbone(model)
        #: [..., hidden] -> [..., vocab]
        self.head = partial(logits_of, model)
        self.switch = rope_switch(model)
        self.layers = tuple(range(len(decoder_layers(model))))
        self.vocabulary, self.device = len(head(model).weight), next(model.parameters()).device
        self.cache = Cache()
        self.parts: VariantParts | None = None
        self._mask = mask_for(model)
        self._vision = None if processor is None else Vision(model, processor)

    @property
    def moves_positions(self) -> bool:
        """Whether the position of a token after images differs from its index."""
        return self._vision is not None and self._vision.axes > 1

    def check_media(self, tokens: Sequence[int], media: Item) -> None:
        """Raise MilesError if a prompt has media that this model cannot read, or lacks placeholders for them."""
        if media and self._vision is None:
            raise MilesError("the request has media, but this engine was built for text; start the run with --media")
        if media and self._vision is not None:
            self._vision.check(tokens, media)

    def clear(self) -> None:
        """Drop every row and return the cache's memory to the device."""
        self.cache = Cache()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def prefixes(
        self, sequences: Sequence[Sequence[int]], names: set[str], computed: Callable[[Prompts], None] | None = None
    ) -> tuple[np.ndarray, Tensor, set[str]]:
        """Compute prefixes into new slots of the cache; returns the slots, and the results of ``fill_prefixes``."""
        slots = self.cache.add_prefixes([len(s) for s in sequences])
        return slots, *self.fill_prefixes(sequences, slots, names, computed)

    @torch.no_grad()
    def fill_media(
        self,
        sequences: Sequence[Sequence[int]],
        media: Sequence[Item],
        slots: np.ndarray,
        names: set[str],
        variants: Sequence[int],
    ) -> tuple[Tensor, set[str], list[int]]:
        """Compute prefixes with media like ``fill_prefixes``; also returns the difference between position and index of the tokens that
        follow each."""
        assert self._vision is not None  # see ``check_media``
        lengths = [len(s) for s in sequences]
        inputs = self._vision.inputs(self._ids([t for s in sequences for t in s]), lengths, media)
        found = self.fill_prefixes(sequences, slots, names, inputs=inputs, variants=variants)
        parts = inputs["position_ids"].split(lengths, -1)
        return *found, [int(p.max()) + 1 - n for p, n in zip(parts, lengths, strict=True)]

    @torch.no_grad()
    def fill_prefixes(
        self,
        sequences: Sequence[Sequence[int]],
        slots: np.ndarray,
        names: set[str],
        computed: Callable[[Prompts], None] | None = None,
        inputs: Mapping[str, Any] | None = None,
        variants: Sequence[int] = (),
    ) -> tuple[Tensor, set[str]]:
        """Compute prefixes into consecutive slots of the cache.

        Args:
            sequences: token ids of each prefix.
            slots: the slot of each.
            names: recorded fields to keep if modules record them.
            computed: called with the prefixes while their call can still attend.
            inputs: arguments of the decoder stack instead of ids and positions.
            variants: variant of the model of each prefix; () if it has none.

        Returns:
            The hidden states of their last tokens [prefixes, hidden], and the names that were recorded.
        """
        lengths = [len(s) for s in sequences]
        ctx = self.context(sum(lengths), np.repeat(np.asarray(variants, np.int64), lengths) if len(variants) else None)
        call = PromptCall(ctx, lengths, self.cache, slots)
        tokens, positions = [t for s in sequences for t in s], _positions(lengths)
        ids, where = self._ids(tokens), to_device(positions, self.device)
        hidden = self.run(ids, where, call, inputs)
        if computed is not None:
            computed(Prompts(call, ids, where, hidden))
        recorded = names & call.ctx.extras.keys()
        for name in recorded:
            rows = call.pad(call.ctx.extras[name])
            slab = field_slab(self.cache.prefixes, name, rows[0])
            slab[int(slots[0]) : int(slots[0]) + len(slots), 0, : rows.shape[1]] = rows
        ends = to_device(np.cumsum(lengths) - 1, self.device)
        return hidden.index_select(0, ends), recorded

    @torch.no_grad()
    def forward(
        self,
        slots: np.ndarray,
        tokens: Sequence[Sequence[int]],
        names: set[str],
        parents: np.ndarray | None = None,
        offsets: Sequence[int] | None = None,
        variants: np.ndarray | None = None,
    ) -> ForwardResult:
        """Feed ``tokens[i]`` (at least one) to row ``slots[i]`` and append them to its cache; ``parents``: see ``CachedRows``;
        ``offsets``: differences between position and index; ``variants`` [rows]: variant of the model of each row."""
        counts = np.fromiter(map(len, tokens), np.int64, len(tokens))
        call = self.call(slots, counts, None, parents, variants)
        held = call.rows
        positions = call.positions
        if offsets is not None:
            positions = positions + to_device(np.repeat(np.asarray(offsets, np.int64), counts), self.device)
        hidden = self.run(self._ids([t for row in tokens for t in row]), positions, call)
        for name in names & call.ctx.extras.keys():
            rows = call.ctx.extras[name]
            held.write(field_slab(self.cache.own, name, rows), rows.unsqueeze(1))
        self.cache.own.lengths[slots] += counts
        return ForwardResult(hidden, self.head)

    def call(
        self,
        slots: np.ndarray,
        counts: np.ndarray,
        lengths: np.ndarray | None = None,
        parents: np.ndarray | None = None,
        variants: np.ndarray | None = None,
    ) -> DecodeCall:
        """Make a call over cached rows, see ``CachedRows``. Does not change the lengths of the rows."""
        held = CachedRows(self.cache, slots, counts, self.device, lengths, parents)
        return DecodeCall(self.context(int(counts.sum()), None if variants is None else variants.repeat(counts)), held)

    @torch.no_grad()
    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float, media: Sequence[Item] = ()
    ) -> list[np.ndarray]:
        """Return log p of every token after the first, [len - 1] float32 per sequence, over the full vocabulary. ``media`` of each sequence; ()
        if none has any."""
        media = media if any(media) else ()
        for sequence, items in zip(sequences, media, strict=bool(media)):
            self.check_media(sequence, items)
        switch = self.switch or max(map(len, sequences))
        grown = {i: s[: switch + 1] for i, s in enumerate(sequences) if len(s) > switch + 1}
        scored = self._score([*sequences, *grown.values()], temperature, [*media, *(media[i] for i in grown if media)])
        for i, beginning in zip(grown, scored[len(sequences) :], strict=True):
            scored[i] = np.concatenate([beginning, scored[i][switch:]])
        return scored[: len(sequences)]

    def _score(self, sequences: Sequence[Sequence[int]], temperature: float, media: Sequence[Item]) -> list[np.ndarray]:
        """Score sequences whose tokens, except the last (which is not fed), all use the same rotary frequencies."""
        fed = [s[:-1] or s for s in sequences]
        lengths, counts = [len(s) for s in fed], [len(s) - 1 for s in sequences]
        call = PromptCall(self.context(sum(lengths)), lengths)
        ids = self._ids([t for s in fed for t in s])
        inputs = self._vision.inputs(ids, lengths, media) if media and self._vision is not None else None
        hidden = self.run(ids, to_device(_positions(lengths), self.device), call, inputs)
        starts = np.cumsum(lengths) - lengths
        sources = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        targets = torch.tensor([t for s in sequences for t in s[1:]], dtype=torch.int64, device=self.device)
        rows = max(1, _LOGITS // self.vocabulary)
        parts = []
        for index, target in zip(to_device(sources, self.device).split(rows), targets.split(rows), strict=True):
            logits = divide_by_temperature(self.head(hidden.index_select(0, index)).float(), temperature)
            normalized = operations_of(self.model).log_softmax(logits)
            parts.append(normalized.gather(1, target.unsqueeze(1)).squeeze(1))
        flat = torch.cat(parts).cpu().numpy() if parts else np.zeros(0, np.float32)
        return np.split(flat, np.cumsum(counts)[:-1])

    def fields(self, slots: np.ndarray, name: str) -> list[np.ndarray]:
        """Return the values recorded under ``name`` for each row: one entry per cached token, prompt first."""
        cache = self.cache
        prefix_slots, which = np.unique(cache.prefix_of[slots], return_inverse=True)
        prompts = _read(cache.prefixes, name, prefix_slots)
        own = _read(cache.own, name, slots)
        assert prompts is not None, f"nothing was recorded under {name}"
        if own is None:
            return [prompts[w].copy() for w in which]
        return [np.concatenate([prompts[w], o]) for w, o in zip(which, own, strict=True)]

    def context(self, tokens: int, variants: np.ndarray | Tensor | None = None) -> Context:
        """Make the context of a call of ``tokens`` tokens. ``variants`` [tokens]: variant of the model of each; a tensor in a static call."""
        ctx = Context("rollout", self.layers, torch.arange(tokens, device=self.device))
        if self.kv_dtype:
            ctx.attached[KV_DTYPE] = self.kv_dtype
        if self.parts is not None and variants is not None:
            ctx.attached[VARIANTS] = self._token_variants(variants, self.parts.capacity)
        return ctx

    def _token_variants(self, variants: np.ndarray | Tensor, capacity: int) -> TokenVariants:
        if isinstance(variants, Tensor):
            return TokenVariants(variants, capacity, static=True)
        same = bool((variants == variants[0]).all())
        return TokenVariants(to_device(variants, self.device), capacity, int(variants[0]) if same else None)

    def run(self, ids: Tensor, positions: Tensor, call: Call, inputs: Mapping[str, Any] | None = None) -> Tensor:
        """Run the model on ids [tokens] at positions [tokens], or on other ``inputs``; returns hidden states [tokens, hidden] after the last
        norm."""
        inputs = inputs or {"input_ids": ids[None], "position_ids": positions[None]}
        out: Any = self.backbone(**inputs, attention_mask=self._mask, use_cache=False, call=call)
        hidden: Tensor = out[0][0]
        return hidden

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self.device)


def _positions(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([np.arange(n) for n in lengths])


def field_slab(store: Store, name: str, like: Tensor) -> Tensor:
    """Slab of ``store`` for the recorded field ``name``, [slots, 1, width, ...]; ``like`` [tokens, ...] gives dtype and shape."""
    return store.slab(("field", name), 1, like.shape[1:], like)


def _read(store: Store, name: str, slots: np.ndarray) -> list[np.ndarray] | None:
    """Copy the field ``name`` of ``slots`` to the host; returns a view per slot, or None if the field was never recorded."""
    slab = store.slabs.get(("field", name))
    if slab is None:
        return None
    lengths = store.lengths[slots]
    picked = slab[to_device(slots, slab.device), 0, : int(lengths.max(initial=0))].cpu()
    rows = (picked.float() if picked.dtype == torch.bfloat16 else picked).numpy()
    return [r[:n] for r, n in zip(rows, lengths.tolist(), strict=True)]


def chunks(lengths: Sequence[int]) -> list[list[int]]:
    """Group indices by similar length; a group has at most _TOKENS tokens with padding, or a single sequence."""
    out: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if out and (len(out[-1]) + 1) * lengths[i] <= _TOKENS:
            out[-1].append(i)
        else:
            out.append([i])
    return out
