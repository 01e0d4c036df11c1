"""Prompts computed by CUDA graphs.

For few tokens, the host needs more time to launch the kernels of a pass than the GPU to run them; a graph launches all of them at once. The
first pass of an
engine is recorded and compared with a plain one. Any other shape is recorded when it occurs for the second time. Until then its step is launched
kernel by kernel, with the same results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from miles_core.errors import NonFiniteError, first_line
from miles_embedded.engine.attention import Prompts
from miles_embedded.engine.graphs import Graphs, check_gap
from miles_embedded.engine.runner import Runner
from miles_embedded.engine.static_attention import CannotBeStatic
from miles_embedded.engine.static_prompts import MOST_TOKENS, PromptBatch, PromptShape, StaticPrompts, TooManyTokens
from miles_embedded.engine.store import to_device
from miles_embedded.model.operations import operations_of

log = logging.getLogger(__name__)

#: Most tokens times parameters of a pass. With more, the GPU takes longer than the host (about 20 ms), and padding costs more than it saves.
_WORK = 8e12
#: Most graphs; further shapes are launched kernel by kernel.
_MOST_GRAPHS = 64
#: Largest relative mean difference, due to rounding, between the cache entries of a static and a plain pass.
_TOLERANCE = 0.25


def most_tokens(parameters: int) -> int:
    """Return the most tokens of a static pass of a model with this many parameters."""
    return int(min(MOST_TOKENS, _WORK / max(1, parameters)))


class PromptGraphs:
    """Static passes over the prompts of ``runner``.

    Args:
        runner: the model and its cache.
        used: whether they are enabled.
        weights: returns the tensors whose addresses the graphs contain.

    Attributes:
        used: whether they are enabled; otherwise every pass is a plain one.
        refused: why they were disabled after the engine was configured to use them; "" otherwise.
    """

    def __init__(self, runner: Runner, used: bool, weights: Callable[[], Iterable[Tensor]]) -> None:
        self.runner, self.used, self.refused = runner, used, ""
        self.batch = PromptBatch(runner.device)
        self._most = most_tokens(sum(p.numel() for p in runner.model.parameters()))
        self._step = StaticPrompts(runner, self.batch)
        self.graphs: Graphs[PromptShape] = Graphs(runner, self._step, weights, lambda cache: cache.prefixes.generation)
        self._seen: set[PromptShape] = set()
        self._never: set[PromptShape] = set()
        self._compared = False

    def fill(
        self,
        sequences: Sequence[Sequence[int]],
        slots: np.ndarray,
        names: set[str],
        variants: Sequence[int],
        computed: Callable[[Prompts], None] | None = None,
    ) -> tuple[Tensor, set[str]]:
        """Compute prefixes into slots of the cache, in a plain pass if there is ``computed`` to call or a static one is not possible;
        see ``Runner.fill_prefixes``."""
        found = None if computed else self._compute(sequences, slots, names, variants)
        return found or self.runner.fill_prefixes(sequences, slots, names, computed, variants=variants)

    @torch.no_grad()
    def _compute(
        self, sequences: Sequence[Sequence[int]], slots: np.ndarray, names: set[str], variants: Sequence[int]
    ) -> tuple[Tensor, set[str]] | None:
        """Compute prefixes with a static pass; None where that is not possible."""
        lengths = [len(s) for s in sequences]
        # a plugin's attention may need the lengths of the prompts on the host
        static = getattr(operations_of(self.runner.model).attention, "static_prompts", False)
        if not (self.used and static) or sum(lengths) > self._most:
            return None
        shape = PromptShape.of(lengths, names)
        if shape in self._never:
            return None
        try:
            plain = None if self._compared else self._compute_plain(sequences, slots, names, variants)
            found = self._run(sequences, slots, variants, shape)[: len(lengths)].clone()
            if plain is not None:
                self._compare(plain, [found, *self._stored(slots, lengths)])
                self._compared = True
            return found, self._step.recorded[shape]
        except TooManyTokens as error:
            self._never.add(shape)
            log.info("%d tokens of prompts are computed without CUDA graphs: %s", shape.tokens, error)
        except NonFiniteError:
            raise
        except (CannotBeStatic, RuntimeError) as error:  # recording fails with RuntimeErrors of many kinds
            self.used, self.refused = False, first_line(error)
            self.clear()
            log.warning("prompts are computed without CUDA graphs, which is slower: %s", self.refused)
        return None

    def weights_changed(self) -> None:
        """Drop the graphs if an update moved any weight."""
        self.graphs.weights_changed()

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self.graphs.clear()
        self._seen.clear()

    def _run(
        self, sequences: Sequence[Sequence[int]], slots: np.ndarray, variants: Sequence[int], shape: PromptShape
    ) -> Tensor:
        """Run a pass; returns the hidden states of the last tokens [prompts, hidden], which the next pass may overwrite."""
        prefixes = self.runner.cache.prefixes
        prefixes.reserve(prefixes.size + 1, 1)
        self.batch.fill(sequences, slots, prefixes.size, shape, variants)
        self._drop_outdated()
        if self._compared and not self._should_record(shape):
            hidden = self._step(shape)
            self._drop_outdated()  # the step may have made slabs
            self._seen.add(shape)
            return hidden
        self._seen.add(shape)
        self.graphs.prepare(shape)
        return self.graphs.run(shape)

    def _should_record(self, shape: PromptShape) -> bool:
        return shape in self._seen and (self.graphs.ready(shape) or len(self.graphs) < _MOST_GRAPHS)

    def _drop_outdated(self) -> None:
        if not self.graphs.current:
            self.clear()

    def _compute_plain(
        self, sequences: Sequence[Sequence[int]], slots: np.ndarray, names: set[str], variants: Sequence[int]
    ) -> list[Tensor]:
        """Return the results of a plain pass: hidden states of the last tokens, and the entries that it stores in the cache, which are then
        zeroed."""
        hidden, _ = self.runner.fill_prefixes(sequences, slots, names, variants=variants)
        lengths = [len(s) for s in sequences]
        stored = self._stored(slots, lengths)
        for slab in self.runner.cache.prefixes.slabs.values():
            slab[int(slots[0]) : int(slots[0]) + len(slots), :, : max(lengths)] = 0
        return [hidden, *stored]

    def _stored(self, slots: np.ndarray, lengths: Sequence[int]) -> list[Tensor]:
        """Copy the entries of prompts from every slab of the cache, [tokens, heads, ...] each."""
        device = self.runner.device
        rows = to_device(np.repeat(slots, lengths), device)
        columns = to_device(np.concatenate([np.arange(n) for n in lengths]), device)
        return [slab[rows, :, columns] for slab in self.runner.cache.prefixes.slabs.values()]

    def _compare(self, plain: list[Tensor], static: list[Tensor]) -> None:
        """Compare the hidden states and the entries of the cache of both passes.

        Raises:
            CannotBeStatic: they differ by more than rounding.
        """
        check_gap(self.runner.model, *(self.runner.head(found[0]) for found in (static, plain)))
        for a, b in zip(static[1:], plain[1:], strict=True):
            gap, size = ((x.double().abs().mean()) for x in (a.double() - b.double(), b))
            if not gap <= _TOLERANCE * size and b.isfinite().all():
                raise CannotBeStatic("a pass in static buffers stores other keys or values than a plain one")
