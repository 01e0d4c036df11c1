"""One decode step over static buffers: feed the last token of each row, sample the next one and store it for the next step.

The step reads no number from the host, so a CUDA graph can replay it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from miles_embedded.engine.runner import Runner
from miles_embedded.engine.sampling import sample_on_device, stream_start, uniform
from miles_embedded.engine.static_attention import StaticCall
from miles_embedded.engine.static_batch import StaticBatch
from miles_embedded.engine.store import round_up
from miles_embedded.kernels.available import kernels_run
from miles_embedded.model.operations import divide_by_temperature, log_softmax, operations_of


@dataclass(frozen=True)
class Shape:
    """Properties that require a separate recording of a step.

    Attributes:
        rows: rows of the batch, padding included.
        draws: whether the step samples tokens; otherwise it ends with the logits.
        mixed: whether some rows may be greedy.
        names: recorded fields to keep if modules record them.
    """

    rows: int
    draws: bool
    mixed: bool = False
    names: frozenset[str] = frozenset()

    #: Tokens that a step appends to each row, and columns of the cache that it writes.
    appended: ClassVar[int] = 1
    reach: ClassVar[int] = 1


def padded_rows(count: int) -> int:
    """Return the number of rows of the smallest step for ``count`` rows: powers of two to 8, multiples of 16 to 64, then of 64.

    Fewer sizes need fewer graphs. Below 185 rows a GPU is limited by reading weights, so padding is cheap.
    """
    if count <= 8:
        return 1 << (count - 1).bit_length()
    return round_up(count, 16 if count <= 64 else 64)


class StaticStep:
    """A decode step of ``runner``'s model over ``batch``; ``seed`` is the run's seed."""

    def __init__(self, runner: Runner, batch: StaticBatch, seed: int) -> None:
        self.runner, self.batch, self.seed = runner, batch, seed

    @torch.no_grad()
    def __call__(self, shape: Shape) -> Tensor:
        """Feed ``batch.tokens`` and append them to the cache; returns logits [rows, vocab].

        If ``shape.draws``, also writes ``batch.results`` and advances ``batch.tokens`` and ``batch.lengths``.
        """
        runner, batch, count = self.runner, self.batch, shape.rows
        call = StaticCall(runner.context(count, batch.variants[:count]), runner.cache, batch, count)
        hidden = runner.run(batch.tokens[:count], call.positions, call)
        call.keep_recorded(shape.names)
        logits: Tensor = runner.head(hidden)
        if shape.draws and self._by_kernel(logits):
            self._draw(logits)
        elif shape.draws:
            u = uniform(self.seed, batch.keys[:count], call.positions + 1)
            normalize = operations_of(runner.model).log_softmax
            tokens, log_probs = sample_on_device(logits, batch.params(count, shape.mixed), u, normalize)
            batch.results[0, :count] = tokens.double()
            batch.results[1, :count] = log_probs.double()
            batch.tokens[:count] = tokens.clamp(max=runner.vocabulary - 1)
            batch.lengths[:count] += 1
        return logits

    def _by_kernel(self, logits: Tensor) -> bool:
        if not (logits.is_cuda and kernels_run(logits.device)):
            return False
        from miles_embedded.kernels.draw import can_draw

        return can_draw(logits)

    def _draw(self, logits: Tensor) -> None:
        from miles_embedded.kernels.draw import draw_rows

        batch, operations, count = self.batch, operations_of(self.runner.model), len(logits)
        draw_rows(logits, batch, stream_start(self.seed))
        if operations.log_softmax is log_softmax:
            return
        # the kernel's log-probabilities are not those of the model's own function
        tokens, temperature = batch.tokens[:count], batch.temperature[:count]
        of_logits = getattr(operations.log_probs, "of_logits", None)
        if of_logits is None:
            found = operations.log_probs(divide_by_temperature(logits.float(), temperature), tokens)
        else:
            found = of_logits(logits, tokens, temperature)
        batch.results[1, :count] = found
