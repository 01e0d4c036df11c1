"""A trainer that runs a schedule of two pipeline stages in one process.

It uses the contract as a pipeline-parallel trainer does, without processes: the model consists of two chunks of layers, the schedule
calls back for one micro-batch and chunk at a time, the first chunk has no logits (``log_probs`` is None, ``hidden`` is set), and several
micro-batches are in flight (alternating forward and backward). A wrapper that stores state outside its context would therefore mix them
up. Activations pass between stages as detached copies, gradients are sent back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context, Loss, LossFunction, Output, Pass
from miles_core.data.batch import Batch
from miles_core.train.loss import trained_tokens, with_auxiliary
from miles_embedded.model.call import watch_layers
from miles_embedded.model.parts import backbone, decoder_layers
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.balance import Balance
from miles_embedded.trainer.columns import gather_columns
from miles_embedded.trainer.data_parallel import add_pairs
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

#: Number of micro-batches by which the first stage may be ahead of the second.
AHEAD = 2


class Stage(nn.Module):
    """A range of decoder layers; the first stage has the embeddings, the last one the norm and the head.

    Args:
        model: the whole model, whose modules are shared.
        layers: global indices of this stage's layers.
    """

    def __init__(self, model: nn.Module, layers: range) -> None:
        super().__init__()
        stack: Any = backbone(model)
        every = decoder_layers(model)
        self.numbers = tuple(layers)
        self.first, self.last = layers.start == 0, layers.stop == len(every)
        self.layers = nn.ModuleList(every[i] for i in layers)
        if self.first:
            self.embed_tokens = stack.embed_tokens
        if self.last:
            self.norm = stack.norm
        self.rotary_emb = stack.rotary_emb
        watch_layers(self, nn.ModuleList())

    def forward(self, x: Tensor, positions: Tensor, call: PackedCall) -> Tensor:
        """Run the stage on x, tokens [1, rows] in the first stage, else hidden [1, rows, hidden]; returns [1, rows, hidden]."""
        hidden = self.embed_tokens(x) if self.first else x
        angles = self.rotary_emb(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=angles,
                use_cache=False,
                call=call,
            )
        return self.norm(hidden) if self.last else hidden


@dataclass
class _Flight:
    """A micro-batch between its stages.

    Attributes:
        micro_batch, ctx: the arguments of the second stage.
        sent: output of the first stage.
        received: its detached copy, input of the second stage.
        extra: auxiliary loss of the first stage, or None.
    """

    micro_batch: Batch
    ctx: Context
    sent: Tensor
    received: Tensor
    extra: Tensor | None


class StagedTrainer(EmbeddedTrainer):
    """A trainer with two pipeline stages; optimizer, export and state are the embedded trainer's.

    Args:
        model: prepared by ``miles_embedded.model.load``.
        config: settings of the embedded trainer.
        reference: makes the reference model.
    """

    def __init__(
        self, model: nn.Module, config: TrainerConfig, reference: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__(model, replace(config, aux_loss_coef=0.0), reference)
        self.stages = _stages(model)
        self.config = config
        self._balances: dict[int, Balance] = {}
        if config.aux_loss_coef > 0:
            self._balances = {id(s): Balance(s, config.aux_loss_coef) for s in self.stages}
        self._reference_stages: list[Stage] | None = None

    @property
    def chunks(self) -> list[nn.Module]:
        """The two stages."""
        return list(self.stages)

    def forward(self, chunk: Any, micro_batch: Batch, ctx: Context) -> Output:
        """Run one stage; the second reads the first one's output from ``ctx.attached["received"]``."""
        packing = ctx.attached["packing"]
        watch = self._balances.get(id(chunk)) if ctx.kind == "train" else None
        if watch is not None:
            watch.open(ctx)
        x = micro_batch.tokens[ctx.rows] if chunk.first else ctx.attached["received"]
        hidden = chunk(x.unsqueeze(0), packing.positions.unsqueeze(0), PackedCall(ctx, packing))[0]
        aux = {} if watch is None else watch.close(ctx, micro_batch, packing)
        if not chunk.last:
            return Output(hidden=hidden, aux=aux)
        model = self.reference if ctx.kind == "ref" else self.model
        return replace(self.predict(model, hidden, micro_batch, ctx), aux=aux)

    @torch.no_grad()
    def log_probs(self, batch: Batch, kind: Pass, entropy: bool = False) -> dict[str, Tensor]:
        """See ``Trainer.log_probs``: run all micro-batches through the first stage, then all through the second."""
        first, last = self._stages_of(kind)
        under_way = []
        for samples in self.split(batch):
            micro_batch, ctx = self.prepare(batch, samples, kind, entropy)
            hidden = self.callbacks.forward(first, micro_batch, self._context(ctx, first)).hidden
            under_way.append((samples, micro_batch, self._context(ctx, last, hidden)))
        results = [(samples, self.callbacks.forward(last, micro_batch, ctx)) for samples, micro_batch, ctx in under_way]
        return gather_columns(batch, results, ("log_probs", "entropy") if entropy else ("log_probs",))

    def step(
        self, batch: Batch, loss: LossFunction | None = None, lr: float | None = None
    ) -> dict[str, tuple[float, float]]:
        """See ``Trainer.step``."""
        self.drop_gradients()
        totals = self.compute_gradients(batch, loss or self.callbacks.loss)
        self.optimizer.fixed_lr = lr
        return self.step_metrics(totals, self.callbacks.optimizer_step())

    def compute_gradients(self, batch: Batch, loss: LossFunction) -> dict[str, tuple[Tensor, Tensor]]:
        """See ``EmbeddedTrainer.compute_gradients``: one forward, one backward, ``AHEAD`` micro-batches deep."""
        tokens = trained_tokens(batch, self.sum)
        totals: dict[str, tuple[Tensor, Tensor]] = {}
        flights: deque[_Flight] = deque()
        for samples in self.split(batch):
            flights.append(self._send(*self.prepare(batch, samples, "train", self.config.entropy), tokens, totals))
            if len(flights) > AHEAD:
                self._finish(flights.popleft(), loss, tokens, totals)
        while flights:
            self._finish(flights.popleft(), loss, tokens, totals)
        return totals

    def _send(
        self, micro_batch: Batch, base: Context, tokens: Tensor, totals: dict[str, tuple[Tensor, Tensor]]
    ) -> _Flight:
        first, last = self.stages
        ctx = self._context(base, first)
        output = self.callbacks.forward(first, micro_batch, ctx)
        assert output.hidden is not None and output.log_probs is None
        extra = with_auxiliary(Loss(output.hidden.new_zeros(())), output, tokens)
        add_pairs(totals, extra.metrics | ctx.metrics)
        received = output.hidden.detach().clone().requires_grad_()
        sent = output.hidden
        return _Flight(
            micro_batch, self._context(base, last, received), sent, received, extra.value if output.aux else None
        )

    def _finish(
        self, flight: _Flight, loss: LossFunction, tokens: Tensor, totals: dict[str, tuple[Tensor, Tensor]]
    ) -> None:
        output = self.callbacks.forward(self.stages[1], flight.micro_batch, flight.ctx)
        share = with_auxiliary(loss(output, flight.micro_batch, flight.ctx), output, tokens)
        add_pairs(totals, share.metrics | flight.ctx.metrics)
        share.value.backward()
        roots, grads = [flight.sent], [flight.received.grad]
        if flight.extra is not None:
            roots, grads = [*roots, flight.extra], [*grads, None]
        torch.autograd.backward(roots, grads)

    def _context(self, base: Context, stage: Stage, received: Tensor | None = None) -> Context:
        return replace(
            base, layers=stage.numbers, attached=base.attached | {"received": received}, extras={}, metrics={}
        )

    def _stages_of(self, kind: Pass) -> list[Stage]:
        if kind != "ref":
            return self.stages
        if self._reference_stages is None:
            self._reference_stages = _stages(self.reference)
        return self._reference_stages


def _stages(model: nn.Module) -> list[Stage]:
    count = len(decoder_layers(model))
    middle = (count + 1) // 2
    return [Stage(model, range(middle)), Stage(model, range(middle, count))]
