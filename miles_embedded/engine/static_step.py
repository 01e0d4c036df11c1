"""One decode step over static buffers: feed each row's last token, draw the next one, and leave everything where the next step
reads it. Nothing in it depends on numbers on the host, so a CUDA graph can replay it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_embedded.engine.cache import round_up
from miles_embedded.engine.runner import Runner, field_slab
from miles_embedded.engine.sampling import sample_on_device, stream_start, uniform
from miles_embedded.engine.static_attention import StaticCall
from miles_embedded.engine.static_batch import StaticBatch
from miles_embedded.kernels.operations import kernels_run


@dataclass(frozen=True)
class Shape:
    """What distinguishes one step from another while it is recorded.

    Attributes:
        rows: of the batch, padding included.
        draws: the step draws tokens; otherwise it ends with logits.
        mixed: some rows may be greedy.
        names: fields to keep if modules record them.
    """

    rows: int
    draws: bool
    mixed: bool = False
    names: frozenset[str] = frozenset()


def padded_rows(count: int) -> int:
    """The rows of the smallest step that holds ``count``: powers of two to 8, then multiples of 16 to 64, then of 64. Fewer sizes
    mean fewer graphs; below 185 rows a GPU waits for weights, so padding costs little."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    return round_up(count, 16 if count <= 64 else 64)


class StaticStep:
    """A decode step of ``runner``'s model over ``batch``; ``seed`` of the run."""

    def __init__(self, runner: Runner, batch: StaticBatch, seed: int) -> None:
        self.runner, self.batch, self.seed = runner, batch, seed

    @torch.no_grad()
    def __call__(self, shape: Shape) -> Tensor:
        """Feed ``batch.tokens`` and append them to the cache; returns logits [rows, vocab].

        A step that draws writes ``batch.results``, and moves ``batch.tokens`` and ``batch.lengths`` on.
        """
        runner, batch, count = self.runner, self.batch, shape.rows
        call = StaticCall(runner.context(count), runner.cache, batch, count)
        hidden = runner.run(batch.tokens[:count], call.positions, call)
        for name in shape.names & call.ctx.extras.keys():
            recorded = call.ctx.extras[name]
            call.write(field_slab(runner.cache.own, name, recorded), recorded.unsqueeze(1))
        logits: Tensor = runner.head(hidden)
        if shape.draws and self._by_kernel(logits):
            self._draw(logits)
        elif shape.draws:
            u = uniform(self.seed, batch.keys[:count], call.positions + 1)
            tokens, log_probs = sample_on_device(logits, batch.params(count, shape.mixed), u)
            batch.results[0, :count] = tokens.double()
            batch.results[1, :count] = log_probs.double()
            batch.tokens[:count] = tokens.clamp(max=runner.vocabulary - 1)
            batch.lengths[:count] += 1
        return logits

    def _by_kernel(self, logits: Tensor) -> bool:
        if not (logits.is_cuda and kernels_run(logits.device)):
            return False
        from miles_embedded.kernels.draw import drawable

        return drawable(logits)

    def _draw(self, logits: Tensor) -> None:
        from miles_embedded.kernels.draw import draw_rows

        draw_rows(logits, self.batch, stream_start(self.seed))
