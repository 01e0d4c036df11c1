"""The embedded engine: continuous batching over Transformers modules in this process.

Requests wait, join the batch at the next step, share the computation of common prompts and leave when they end. An asyncio task
steps the batch while there is work and yields to other tasks between steps; the batch changes only between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.contracts.engine import EnginePart, PauseMode, Request, Response
from miles_core.errors import NonFiniteError
from miles_embedded.engine import sampling as draw
from miles_embedded.engine.async_scheduling import AsyncScheduling
from miles_embedded.engine.attention import DecodeCall
from miles_embedded.engine.decoder import AsyncSteps, Decoder, PlainDecoder
from miles_embedded.engine.prefixes import Key, Prefix, Prefixes, missing_fields_error
from miles_embedded.engine.prompt_graphs import PromptGraphs
from miles_embedded.engine.row import Row, parameters_of, recorded_rows, slots_of
from miles_embedded.engine.runner import ForwardResult, move_items
from miles_embedded.engine.scheduler import Scheduler
from miles_embedded.engine.served_model import ServedModel
from miles_embedded.engine.settings import Settings
from miles_embedded.engine.step import StepEngine
from miles_embedded.manifest import plugin as EMBEDDED
from miles_embedded.model.operations import operations_of
from miles_embedded.model.parts import text_configuration


class EmbeddedEngine(ServedModel, StepEngine):
    """Engine that generates with ``model``, as prepared by ``miles_embedded.model.load``, on the model's device; ``decoder`` performs
    the steps, by default one token per row.

    Attributes:
        served: the model of each variant (``miles_embedded.model.variants``), whose requests are paused and whose weights are updated
            separately; None for one that has left. An engine of one policy serves its own model only.
    """

    capabilities = frozenset(c.name for c in EMBEDDED.list_capabilities("engine"))

    def __init__(self, model: nn.Module, settings: Settings, decoder: Decoder | None = None) -> None:
        super().__init__(model, settings)
        self.decoder = decoder or PlainDecoder()
        self.served: list[ServedModel | None] = [self]
        vocabulary = text_configuration(model).vocab_size
        self.scheduler = Scheduler(settings.detokenize, settings.eos, self.max_context, vocabulary)
        self.columns = self.scheduler.columns
        self.rows: list[Row] = []
        self._abandoned: list[Row] = []
        self._joining: list[Row] = []
        self._stopped = False
        self._task: asyncio.Task[None] | None = None
        self._batch: tuple[draw.Params, Tensor, Tensor | None] | None = None
        self._names: set[str] | None = None
        self.async_steps: AsyncScheduling[Any] = AsyncSteps(
            self, used=settings.cuda_graphs and self.runner.device.type == "cuda" and not self.runner.moves_positions
        )
        self.prompts = PromptGraphs(self.runner, self.async_steps.used, self.weight_tensors)
        self._prefixes = Prefixes(self.runner, self.prompts)

    async def start(self) -> None:
        self._stopped = self.paused = False

    async def stop(self) -> None:
        await self.pause("abort")
        await self.sleep(["cache"])
        self._stopped = True

    async def generate(self, request: Request) -> Response:
        if self._stopped:
            raise RuntimeError("the engine was stopped; call start first")
        return await self.submit(request, 0)

    async def submit(self, request: Request, variant: int) -> Response:
        """Generate with a variant of the model, see ``generate``."""
        self.runner.check_media(request.tokens, request.media)
        row = self.scheduler.make_row(request, asyncio.get_running_loop().create_future())
        row.variant = variant
        self.scheduler.waiting.append(row)
        self.wake_up()
        try:
            return await row.future
        except asyncio.CancelledError:
            self._abandoned.append(row)
            raise

    async def pause(self, mode: PauseMode = "abort") -> None:
        self.paused = True
        self.hold(0, mode)

    def hold(self, variant: int, mode: PauseMode) -> None:
        """Do with the requests of a variant what ``pause`` does."""
        if mode == "abort":
            self.end(variant)
        elif mode == "retract":
            self._retract([row for row in self.rows if row.variant == variant])
        elif mode != "in_place":
            raise ValueError(f"pause mode {mode!r} must be abort, retract or in_place")
        self.async_steps.settle()

    async def abort(self, keys: Collection[int] | None = None) -> None:
        self.end(0, keys)

    def end(self, variant: int, keys: Collection[int] | None = None, error: Exception | None = None) -> None:
        """End requests of a variant (see ``abort``), or let them fail with ``error``."""
        meant = [row for row in self.requests(variant) if keys is None or row.request.key in keys]
        if error is not None:
            for row in meant:
                row.future.set_exception(error)
        waiting = [row for row in meant if row.slot < 0]
        self._finish([row for row in meant if row.slot >= 0], "abort")
        for row in waiting:
            self.scheduler.waiting.remove(row)
        self.scheduler.respond(waiting, "abort", [row.saved for row in waiting])

    def requests(self, variant: int) -> list[Row]:
        """Return the requests of a variant, running and waiting."""
        return [row for row in chain(self.rows, self.scheduler.waiting) if row.variant == variant]

    async def resume(self) -> None:
        self.paused = False
        self.wake_up()

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

    # -- interface of decoders --------------------------------------------------------------------------------------

    def recorded_fields(self) -> set[str]:
        if self._names is None:
            self._names = set().union(*(row.fields for row in self.rows))
        return self._names

    def forward(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], parents: np.ndarray | None = None
    ) -> ForwardResult:
        offsets = [row.offset for row in rows] if self.runner.moves_positions else None
        slots, names = slots_of(rows), self.recorded_fields()
        return self.runner.forward(slots, tokens, names, parents, offsets, self.columns.variants[slots])

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

    def wake_up(self) -> None:
        """Step while there are requests that are not paused."""
        if self._has_work() and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._steps())

    async def _steps(self) -> None:
        try:
            while self._has_work():
                self._step()
                await asyncio.sleep(0)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _has_work(self) -> bool:
        held = self._find_held()
        return any(row.variant not in held for row in chain(self.rows, self.scheduler.waiting))

    def _find_held(self) -> set[int]:
        """Return the variants whose requests wait."""
        return {index for index, each in enumerate(self.served) if each is None or each.paused}

    def _running(self, held: Collection[int]) -> list[Row]:
        """Return the rows that the next step advances."""
        if held and any(row.variant in held for row in self.rows):
            return [row for row in self.rows if row.variant not in held]
        return self.rows

    def _versions(self) -> np.ndarray:
        """[variants] version of the weights of each."""
        return np.array([-1 if each is None else each.version for each in self.served])

    @torch.no_grad()
    def _step(self) -> None:
        self._weights.check()
        held = self._find_held()
        gone, self._abandoned = self._abandoned, []
        self._leave([row for row in gone if row.slot >= 0])
        try:
            with self._weights.packs.activate():
                self._admit(held)
                rows = self._running(held)
                emitted = self.decoder.step(self, rows) if rows else None
            if emitted is not None:
                self._finish(self.scheduler.accept(rows, emitted, self._versions()))
        except NonFiniteError as error:
            self._fail_nonfinite(error)

    def _fail_nonfinite(self, error: NonFiniteError) -> None:
        """Fail the requests of variants that compute values which are not finite, and compute the rows of the others again.

        Raises:
            NonFiniteError: there is one variant only, or none computes such values when it scores its rows.
        """
        outside = [row for row in self._joining if row.slot < 0]
        rows, found = [*self.rows, *outside], dict[int, NonFiniteError]()
        for index in {row.variant for row in rows}:
            each = self.served[index]
            where = "" if each is None else each.find_nonfinite([row.tokens for row in rows if row.variant == index])
            if where or len(self.served) == 1:
                of = f"engine, weight version {self._versions()[index]}: {where or 'no single module'}"
                found[index] = NonFiniteError(f"{of} found by scoring its rows again, because {error}")
        if len(self.served) == 1 or not found:
            raise next(iter(found.values()), error) from error
        self.scheduler.waiting.extendleft(reversed(outside))
        self._joining = []
        self._retract(list(self.rows))
        for index, own in found.items():
            self.end(index, error=own)

    def _admit(self, held: Collection[int]) -> None:
        waiting, left = self.scheduler.waiting, []
        while waiting and len(self.rows) + len(self._joining) < self.settings.max_running_requests:
            row = waiting.popleft()
            if row.variant in held:
                left.append(row)
            elif not row.future.done():
                self._joining.append(row)
        waiting.extendleft(reversed(left))
        if self._joining:
            self._join(self._joining)
            self._joining = []
        # The next token of these rows uses other rotary frequencies than the cached keys: recompute all of their tokens.
        lengths, switch = self.columns.lengths[: len(self.rows)], self.runner.switch
        if switch and len(grown := np.flatnonzero(lengths == switch + 1)):
            self._retract([self.rows[slot] for slot in grown], recompute=True)
            self._admit(held)

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
        self._finish(self.scheduler.accept(rows, sampled, self._versions()))

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
        self.invalidate(0)

    def invalidate(self, variant: int) -> None:
        """Invalidate state that depends on the weights of a variant."""
        self._prefixes.retire(variant)
        self.async_steps.settle()
        self.async_steps.graphs.weights_changed()

    def _clear(self) -> None:
        """Free the memory of the cache."""
        self.async_steps.graphs.clear()
        self._prefixes.clear()
        self.runner.clear()

    def _require_idle(self, what: str) -> None:
        if not self.paused and (self.rows or self.scheduler.waiting):
            raise RuntimeError(f"{what} with {len(self.rows)} requests in flight: pause or abort them first")

    def _invalidate_batch(self) -> None:
        self._batch = self._names = None

    def _parameters(self, rows: Sequence[Row]) -> tuple[draw.Params, Tensor, Tensor | None]:
        kept = self._batch if rows is self.rows else None
        found = parameters_of(rows, self.runner.device) if kept is None else kept
        self._batch = found if rows is self.rows else self._batch
        return found
