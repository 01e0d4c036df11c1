"""The embedded engine: continuous batching over Transformers modules in this process.

Requests wait, join the batch at the next step, share the computation of common prompts and leave when they end. An asyncio task
steps the batch while there is work and yields to other tasks between steps; the batch changes only between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.contracts.answer import Answer
from miles_core.contracts.engine import Engine, EnginePart, PauseMode, Request, check_scored
from miles_core.data.weight_unit import Encoded
from miles_core.errors import NonFiniteError
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format, Stored
from miles_core.precision.quantizer import FormatItself
from miles_embedded.engine import sampling as draw
from miles_embedded.engine.async_scheduling import AsyncScheduling
from miles_embedded.engine.attention import DecodeCall
from miles_embedded.engine.decoder import AsyncSteps, Decoder, PlainDecoder
from miles_embedded.engine.prefixes import Key, Prefix, Prefixes, missing_fields_error
from miles_embedded.engine.prompt_graphs import PromptGraphs
from miles_embedded.engine.row import Row, parameters_of, recorded_rows, slots_of
from miles_embedded.engine.runner import ForwardResult, Runner, chunks, move_items
from miles_embedded.engine.scheduler import Scheduler
from miles_embedded.engine.settings import Settings
from miles_embedded.engine.step import StepEngine
from miles_embedded.engine.weights import Weights
from miles_embedded.manifest import plugin as EMBEDDED
from miles_embedded.model.load import context_limit, facts_of
from miles_embedded.model.nonfinite import first_nonfinite
from miles_embedded.model.operations import operations_of
from miles_embedded.model.parts import text_configuration
from miles_embedded.model.views import Loader
from miles_embedded.model.vision import Item
from miles_embedded.quantized.linear import linear_shapes


class EmbeddedEngine(Engine, StepEngine):
    """Engine that generates with ``model``, as prepared by ``miles_embedded.model.load``, on the model's device; ``decoder`` performs
    the steps, by default one token per row."""

    capabilities = frozenset(c.name for c in EMBEDDED.list_capabilities("engine"))

    def __init__(self, model: nn.Module, settings: Settings, decoder: Decoder | None = None) -> None:
        self.model, self.settings, self.decoder = model, settings, decoder or PlainDecoder()
        self.max_context = context_limit(model, settings.max_context)
        self.kv_cache_dtype = settings.kv_cache_dtype
        self.runner = Runner(model, settings.kv_cache_dtype, settings.processor)
        vocabulary = text_configuration(model).vocab_size
        self.scheduler = Scheduler(settings.detokenize, settings.eos, self.max_context, vocabulary)
        self.columns = self.scheduler.columns
        self.rows: list[Row] = []
        self._abandoned: list[Answer] = []
        self._joining: list[Row] = []
        self._weights = Weights(model, settings.codec, settings.products, settings.codec_of, self._invalidate_weights)
        self._paused, self._stopped = False, False
        self._task: asyncio.Task[None] | None = None
        self._batch: tuple[draw.Params, Tensor, Tensor | None] | None = None
        self._names: set[str] | None = None
        self.async_steps: AsyncScheduling[Any] = AsyncSteps(
            self, used=settings.cuda_graphs and self.runner.device.type == "cuda" and not self.runner.moves_positions
        )
        self.prompts = PromptGraphs(self.runner, self.async_steps.used, self.weight_tensors)
        self._prefixes = Prefixes(self.runner, self.prompts)

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def codec(self) -> Codec:
        """Codec that decodes incoming weights."""
        return self._weights.codec

    async def start(self) -> None:
        self._stopped = self._paused = False

    async def stop(self) -> None:
        await self.pause("abort")
        await self.sleep(["cache"])
        self._stopped = True

    def generate(self, request: Request) -> Answer:
        if self._stopped:
            raise RuntimeError("the engine was stopped; call start first")
        self.runner.check_media(request.tokens, request.media)
        row = self.scheduler.make_row(request, Answer(self._abandoned))
        self.scheduler.waiting.append(row)
        self._wake()
        return row.future

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, media: Sequence[Item] = ()
    ) -> list[np.ndarray]:
        check_scored(sequences, self.max_context)
        results: dict[int, np.ndarray] = {}
        for chunk in chunks([len(s) for s in sequences]):
            self._weights.check()
            scored = self.runner.score([sequences[i] for i in chunk], temperature, [media[i] for i in chunk if media])
            results.update(zip(chunk, scored, strict=True))
            await asyncio.sleep(0)
        return [results[i] for i in range(len(sequences))]

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        self._require_idle("update_weights")
        self._weights.update(units, version)

    def reserve(self, name: str, stored: Mapping[str, Stored]) -> Mapping[str, Tensor]:
        return self._weights.inputs.reserve(name)

    async def share_weights(self, units: Iterable[Encoded], version: int) -> int:
        self._require_idle("share_weights")
        return self._weights.update(units, version, share=True)

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        if not message.get("staged"):
            self._require_idle("receive")
        await self._weights.arrivals.receive(message, version, last)

    async def pause(self, mode: PauseMode = "abort") -> None:
        self._paused = True
        if mode == "abort":
            await self.abort()
        elif mode == "retract":
            self._retract(list(self.rows))
        elif mode != "in_place":
            raise ValueError(f"pause mode {mode!r} must be abort, retract or in_place")
        self.async_steps.settle()

    async def abort(self, keys: Collection[int] | None = None) -> None:
        meant = [row for row in (*self.rows, *self.scheduler.waiting) if keys is None or row.request.key in keys]
        waiting = [row for row in meant if row.slot < 0]
        self._finish([row for row in meant if row.slot >= 0], "abort")
        for row in waiting:
            self.scheduler.waiting.remove(row)
        self.scheduler.respond(waiting, "abort", [row.saved for row in waiting])

    async def resume(self) -> None:
        self._paused = False
        self._wake()

    async def sleep(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        if self.rows:
            raise RuntimeError(f"sleep with {len(self.rows)} requests in the cache: abort or retract them first")
        if "cache" in parts:
            self._clear()  # allocated again on the next request
        if "weights" in parts:
            self._weights.release()

    async def wake(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        if "weights" in parts:
            self._weights.restore()

    async def rebuild(self, precision: str) -> None:
        self._require_idle("rebuild")
        self._weights.rebuild(precision)

    def quantizer(self, format: Format) -> FormatItself:
        """Return the format's own quantizer; this engine defines no other code."""
        return FormatItself(format, self.settings.products.of(format, self.model), linear_shapes(self.model))

    @property
    def native_products(self) -> bool:  # type: ignore[override]
        return bool(self._weights.inputs.layers)

    def emulated_products(self) -> AbstractContextManager[None]:
        return self._weights.inputs.emulate()

    def model_facts(self) -> Mapping[str, Any]:
        return facts_of(self.model)

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        return Loader(self.model).dtypes()

    async def weight_checksums(self, names: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
        return {"": self._weights.checksums(names)}

    # -- interface of decoders --------------------------------------------------------------------------------------

    def weight_tensors(self) -> Iterable[Tensor]:
        return self._weights.tensors()

    def recorded_fields(self) -> set[str]:
        if self._names is None:
            self._names = set().union(*(row.fields for row in self.rows))
        return self._names

    def forward(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], parents: np.ndarray | None = None
    ) -> ForwardResult:
        offsets = [row.offset for row in rows] if self.runner.moves_positions else None
        return self.runner.forward(slots_of(rows), tokens, self.recorded_fields(), parents, offsets)

    def call(
        self, rows: Sequence[Row], counts: Sequence[int], lengths: Sequence[int], parents: np.ndarray | None = None
    ) -> DecodeCall:
        slots, counted = slots_of(rows), np.asarray(counts, np.int64)
        return self.runner.call(slots, counted, self.runner.cache.own_lengths(slots, lengths), parents)

    def truncate(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        self.runner.cache.cut(slots_of(rows), lengths)

    def keep(self, rows: Sequence[Row], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        slots, counts = slots_of(rows), np.fromiter(map(len, paths), np.int64, len(paths))
        front = self.runner.cache.own_lengths(slots, lengths)
        self.runner.cache.pick(slots, front, counts, np.concatenate([np.asarray(p, np.int64) for p in paths]))

    def sample(
        self, logits: Tensor, rows: Sequence[Row], positions: Tensor | None = None, stream: int = 0
    ) -> draw.Sampled:
        params, _, recording = self._parameters(rows)
        u = self.uniform(rows, positions, stream)
        return draw.sample(logits, params, u, recording, operations_of(self.model).log_softmax)

    def distribution(self, logits: Tensor, rows: Sequence[Row], counts: Tensor | None = None) -> draw.Distribution:
        params = self._parameters(rows)[0].repeat(counts)
        return draw.distribution(logits, params, operations_of(self.model).log_softmax)

    def record(
        self, dist: draw.Distribution, rows: Sequence[Row], tokens: Tensor, counts: Tensor | None = None
    ) -> draw.Sampled:
        recording = self._parameters(rows)[2]
        if recording is not None and counts is not None:
            recording = recording.repeat_interleave(counts)
        return draw.record(dist, tokens, recording)

    def uniform(self, rows: Sequence[Row], positions: Tensor | None = None, stream: int = 1) -> Tensor:
        keys = self._parameters(rows)[1]
        if positions is not None and positions.dim() == 2:
            keys = keys.unsqueeze(1)
        if positions is None:
            positions = torch.from_numpy(self.columns.lengths[slots_of(rows)]).to(keys.device)
        return draw.uniform(self.settings.seed, keys, positions, stream)

    def _wake(self) -> None:
        if not self._paused and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._steps())

    async def _steps(self) -> None:
        try:
            while not self._paused and (self.rows or self.scheduler.waiting):
                self._step()
                await asyncio.sleep(0)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    @torch.no_grad()
    def _step(self) -> None:
        self._weights.check()
        if self._abandoned:
            gone = {*self._abandoned}
            self._abandoned.clear()
            self._leave([row for row in self.rows if row.future in gone])
        try:
            with self._weights.packs.activate():
                self._admit()
                emitted = self.decoder.step(self, self.rows) if self.rows else None
            if emitted is not None:
                self._finish(self.scheduler.accept(self.rows, emitted, self.version))
        except NonFiniteError as error:
            tokens = [row.tokens for row in (*self.rows, *self._joining)]
            found = first_nonfinite(self.model, lambda: self.runner.score(tokens, 1.0)) or "no single module"
            message = f"engine, weight version {self.version}: {found} found by scoring its rows again, because {error}"
            raise NonFiniteError(message) from error

    def _admit(self) -> None:
        waiting = self.scheduler.waiting
        while waiting and len(self.rows) + len(self._joining) < self.settings.max_running_requests:
            row = waiting.popleft()
            if not row.future.done():
                self._joining.append(row)
        if self._joining:
            self._join(self._joining)
            self._joining = []
        # The next token of these rows uses other rotary frequencies than the cached keys: recompute all of their tokens.
        lengths, switch = self.columns.lengths[: len(self.rows)], self.runner.switch
        if switch and len(grown := np.flatnonzero(lengths == switch + 1)):
            self._retract([self.rows[slot] for slot in grown], recompute=True)
            self._admit()

    def _join(self, joining: list[Row]) -> None:
        starts = [row.start for row in joining]
        wanted: dict[Key, set[str]] = {}
        for row, start in zip(joining, starts, strict=True):
            wanted.setdefault(start, set()).update(row.fields)
        computed = partial(self.decoder.prompts, self) if self.decoder.reads_prompts else None
        found = self._prefixes.compute(wanted, computed)
        pairs = [(row, found[start]) for row, start in zip(joining, starts, strict=True)]
        for row, prefix in pairs:
            if lacking := row.fields - prefix.fields:
                row.future.set_exception(missing_fields_error(lacking))
        pairs = [(row, prefix) for row, prefix in pairs if not row.future.done()]
        if not pairs:
            return
        slots = self.runner.cache.add_rows([prefix.slot for _, prefix in pairs])
        for (row, prefix), slot in zip(pairs, slots.tolist(), strict=True):
            row.slot, row.offset = slot, prefix.offset
        joining = [row for row, _ in pairs]
        self.rows += joining
        self.columns.join(joining)
        self._invalidate_batch()
        self.decoder.join(self, joining, [prefix.hidden for _, prefix in pairs])
        self._first_tokens([(row, prefix) for row, prefix in pairs if row.recompute or not row.log_probs])

    def _first_tokens(self, fresh: list[tuple[Row, Prefix]]) -> None:
        """Sample the first token after the prefixes; logits are computed once per shared prefix."""
        if not fresh:
            return
        order = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefix for _, prefix in fresh))}
        logits = self.runner.head(torch.stack([prefix.hidden for prefix in order]))
        index = torch.tensor([order[prefix] for _, prefix in fresh], device=logits.device)
        rows = [row for row, _ in fresh]
        for row in rows:
            row.recompute = False
        sampled = self.sample(logits.index_select(0, index), rows)
        self._finish(self.scheduler.accept(rows, sampled, self.version))

    def _finish(self, rows: list[Row], finish: str = "") -> None:
        if not rows:
            return
        rows = list(rows)
        extras = recorded_rows(self.runner, self.recorded_fields(), rows)
        self._leave(rows)
        self.scheduler.respond(rows, finish, extras)

    def _leave(self, rows: Sequence[Row]) -> None:
        """Remove rows from the batch and the cache."""
        if not rows:
            return
        self.decoder.leave(rows)
        self.async_steps.leave(rows)
        self.columns.leave(rows)
        where, sources, prefixes = self.runner.cache.remove_rows(np.sort(slots_of(rows)))
        for row in rows:
            row.slot = -1
        move_items(self.rows, where, sources, self.runner.cache.rows)
        self.columns.move(where, sources, self.runner.cache.rows)
        self.async_steps.apply_moves(where, sources)
        self._prefixes.apply_moves(*prefixes)
        self._invalidate_batch()

    def _retract(self, rows: list[Row], recompute: bool = False) -> None:
        for row, saved in zip(rows, recorded_rows(self.runner, self.recorded_fields(), rows), strict=True):
            row.saved, row.recompute = saved, recompute
        self._leave(rows)
        self.scheduler.waiting.extendleft(reversed(rows))

    def _fail(self, error: BaseException) -> None:
        rows = [*self.rows, *self._joining, *self.scheduler.waiting]
        self.decoder.leave(self.rows)
        self.async_steps.leave(self.rows)
        self.columns.clear(self.rows)
        self.rows.clear()
        self._joining = []
        self.scheduler.waiting.clear()
        self._clear()
        self._invalidate_batch()
        for row in rows:
            if not row.future.done():
                row.future.set_exception(error) if isinstance(error, Exception) else row.future.cancel()

    def _invalidate_weights(self) -> None:
        """Invalidate state that depends on the weights, which changed or will change."""
        self._prefixes.retire()
        self.async_steps.settle()
        self.async_steps.graphs.weights_changed()

    def _clear(self) -> None:
        """Free the memory of the cache."""
        self.async_steps.graphs.clear()
        self._prefixes.clear()
        self.runner.clear()

    def _require_idle(self, what: str) -> None:
        """RuntimeError if unpaused requests are in flight, which ``what`` would affect."""
        if not self._paused and (self.rows or self.scheduler.waiting):
            raise RuntimeError(f"{what} with {len(self.rows)} requests in flight: pause or abort them first")

    def _invalidate_batch(self) -> None:
        self._batch = self._names = None

    def _parameters(self, rows: Sequence[Row]) -> tuple[draw.Params, Tensor, Tensor | None]:
        kept = self._batch if rows is self.rows else None
        found = parameters_of(rows, self.runner.device) if kept is None else kept
        self._batch = found if rows is self.rows else self._batch
        return found
