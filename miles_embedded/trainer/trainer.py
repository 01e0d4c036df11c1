"""The embedded trainer: a Transformers model in this process, trained on packed micro-batches.

A micro-batch passes the model as one row of tokens (``packing``), only attention uses the tree (``attention``), and ``lm_head`` is
applied only at trained positions (``logprobs``). The split of samples into micro-batches changes the time and memory of a step, but not
its result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miles_core.contracts.emulation import Emulation
from miles_core.contracts.trainer import Callbacks, Context, LossFunction, Output, Pass, Trainer, TrainerPart
from miles_core.data.batch import Batch, Ragged, as_floats, to_device
from miles_core.data.field import CANDIDATES, SAMPLING_SUPPORT
from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import ConfigError, NonFiniteError
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format
from miles_core.precision.quantizer import FormatItself
from miles_core.precision.snapshot import Snapshot
from miles_core.train.loss import trained_tokens, with_auxiliary
from miles_embedded.model.export import export_checkpoint
from miles_embedded.model.growing_rope import rope_switch
from miles_embedded.model.image_processor import ImageProcessor
from miles_embedded.model.load import facts_of
from miles_embedded.model.logprobs import head_log_probs, scatter, top_log_probs
from miles_embedded.model.parts import backbone, decoder_layers, is_critic, value_head
from miles_embedded.model.released import Released
from miles_embedded.model.storage import constant_tensors, local_shard
from miles_embedded.model.views import export
from miles_embedded.model.vision import Vision, shares
from miles_embedded.model.windows import mask_for
from miles_embedded.quantized.linear import linear_shapes
from miles_embedded.quantized.trained import TrainedPrecision
from miles_embedded.trainer import checkpoint
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.balance import Balance
from miles_embedded.trainer.columns import check_columns, gather_columns, predict_values
from miles_embedded.trainer.data_parallel import Alone, add_pairs, drain
from miles_embedded.trainer.emulate import emulate_properties
from miles_embedded.trainer.expert_loads import ExpertLoads
from miles_embedded.trainer.loss_scale import make_loss_scale
from miles_embedded.trainer.nonfinite import first_nonfinite_in_step
from miles_embedded.trainer.optimizer import MakeOptimizer, Optimizer
from miles_embedded.trainer.packing import Packing, idle_sample, pack_grown, split
from miles_embedded.trainer.recomputation import recompute_layers
from miles_embedded.trainer.trainer_config import TrainerConfig as TrainerConfig


class EmbeddedTrainer(Trainer):
    """Trainer of one Transformers model (prepared by ``miles_embedded.model.load``), in one process or several.

    Args:
        model: the model.
        config: see ``TrainerConfig``.
        reference: makes the reference model for ``kind="ref"`` on first use, on the device of ``model``.
        precision: precision of the models; None if it is fixed.
        parallel: data-parallel strategy. Every process has such a trainer and receives the same calls.
        optimizer: makes the optimizer from parameter groups; AdamW by default.
        processor: the model's image processor, for samples with media.

    Raises:
        ConfigError: a model to be trained has no trainable parameter.
    """

    capabilities = frozenset({
        "entropy", "format:*", "media", "sampling_support", "rebuild", "sleep", "values", "top_log_probs", "candidates", "optimizers",
        "adapters", "divisible_step",
    })  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        reference: Callable[[], nn.Module] | None = None,
        precision: TrainedPrecision | None = None,
        parallel: Alone | None = None,
        optimizer: MakeOptimizer | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        self.model, self.processor = model, processor
        self.config = config
        self.precision = precision
        self.parallel = parallel or Alone()
        self.world = self.parallel.world
        self.layers = tuple(range(len(decoder_layers(model))))
        if not config.trains:
            model.requires_grad_(False)
        elif not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                f"no weight of {type(model).__name__} is trained: all of them are frozen (requires_grad is False) after on_model"
            )
        self.parallel.shard(model)
        scale = make_loss_scale(model, *config.loss_scale)
        self.optimizer = Optimizer(model, config.optimizer, self.parallel, optimizer, scale, config.offload_optimizer)
        self.balance = Balance(model, config.aux_loss_coef) if config.aux_loss_coef > 0 else None
        self.loads = ExpertLoads(model)
        self._make_reference = reference
        self._reference: nn.Module | None = None
        if config.recompute:
            recompute_layers(model, sharded=self.world.size > 1, observed=self.balance is not None)
        self._switch, self._mask = rope_switch(model), mask_for(model)
        self._scored: nn.Module | None = None
        self._asleep: dict[TrainerPart, Released] = {"weights": Released(keep=True), "optimizer": Released(keep=True)}
        self._attached: dict[str, Any] = {}
        self.callbacks = Callbacks(self.forward, _no_loss, self.optimizer_step)

    @property
    def chunks(self) -> list[nn.Module]:
        """The model as the only chunk."""
        return [self.model]

    @property
    def device(self) -> torch.device:
        """Device of the model that ``log_probs`` and ``step`` use."""
        return next((self._scored or self.model).parameters()).device

    @property
    def reference(self) -> nn.Module:
        """The reference model, loaded on first use."""
        if self._reference is None:
            if self._make_reference is None:
                raise RuntimeError("this trainer was built without a reference model")
            reference = self._make_reference().requires_grad_(False).eval()
            self.parallel.shard(reference)
            self._reference = reference
        return self._reference

    def forward(self, chunk: Any, micro_batch: Batch, ctx: Context) -> Output:
        """Compute log-probs at trained positions; ``ctx.attached["entropy"]`` (bool) requests the entropy."""
        packing: Packing = ctx.attached["packing"]
        call = PackedCall(ctx, packing)
        watch = self.balance if ctx.kind == "train" else None
        if watch is not None:
            watch.open(ctx)
        if ctx.kind == "train":
            self.loads.open(ctx, packing)
        hidden = backbone(chunk)(
            **self._inputs(chunk, micro_batch, packing),
            attention_mask=self._mask,
            use_cache=False,
            call=call,
        ).last_hidden_state.squeeze(0)
        self.loads.close(ctx)
        aux = {} if watch is None else watch.close(ctx, micro_batch, packing)
        return replace(self.predict(chunk, hidden, micro_batch, ctx), aux=aux)

    def _inputs(self, model: nn.Module, micro_batch: Batch, packing: Packing) -> dict[str, Tensor]:
        """Return the arguments of the decoder stack for the rows of a packing."""
        if micro_batch.media:
            if self.processor is None:
                raise ConfigError("samples have media, but this trainer was built for text; start the run with --media")
            vision = Vision(model, self.processor)
            return vision.inputs(micro_batch.tokens, micro_batch.lengths.tolist(), micro_batch.media, packing.rows)
        ids = micro_batch.tokens[packing.rows]
        return {"input_ids": ids.unsqueeze(0), "position_ids": packing.positions.unsqueeze(0)}

    def predict(self, model: nn.Module, hidden: Tensor, micro_batch: Batch, ctx: Context) -> Output:
        """Compute log-probs, and other outputs requested by ``ctx``, from final hidden states [rows, hidden]; values if it has a value head."""
        packing: Packing = ctx.attached["packing"]
        sources, length = hidden.index_select(0, packing.sources), len(micro_batch.tokens)
        values = None if value_head(model) is None else predict_values(model, sources, ctx, packing, length)
        if is_critic(model):
            return Output(values=values)
        support = micro_batch.columns.get(SAMPLING_SUPPORT.name)
        assert support is None or isinstance(support, Ragged)
        candidates = micro_batch.columns.get(CANDIDATES.name)
        assert candidates is None or isinstance(candidates, Tensor)
        log_probs, entropy, others = head_log_probs(
            model,
            sources,
            micro_batch.tokens[packing.targets],
            self.config.temperature,
            None if support is None else support.select(packing.targets),
            bool(ctx.attached.get("entropy")),
            candidates=None if candidates is None else candidates[packing.targets],
        )
        tokens, best, normalizer = None, None, None
        if ctx.top_k or "log_normalizer" in ctx.wanted:
            tokens, best, normalizer = top_log_probs(model, sources, ctx.top_k, self.config.temperature)
        return Output(
            top_tokens=None if tokens is None else scatter(tokens, packing.targets, length),
            top_log_probs=None if best is None else scatter(best, packing.targets, length),
            log_normalizer=None if normalizer is None else scatter(normalizer, packing.targets, length),
            log_probs=scatter(log_probs, packing.targets, length),
            values=values,
            entropy=None if entropy is None else scatter(entropy, packing.targets, length),
            candidate_log_probs=None if others is None else scatter(others, packing.targets, length),
        )

    def optimizer_step(self) -> dict[str, float]:
        return self.optimizer.step()

    def log_probs(self, batch: Batch, kind: Pass, entropy: bool = False) -> dict[str, Tensor]:
        return self.columns(batch, kind, ("log_probs", "entropy") if entropy else ("log_probs",))

    @torch.no_grad()
    def columns(self, batch: Batch, kind: Pass, wanted: Collection[str], top_k: int = 0) -> dict[str, Tensor]:
        chunk = self.reference if kind == "ref" else self._scored or self.model
        check_columns(chunk, wanted, top_k)
        results = []
        for samples, micro_batch, ctx in self.micro_batches(batch, kind, "entropy" in wanted):
            ctx.wanted, ctx.top_k = frozenset(wanted), top_k if "top_tokens" in wanted else 0
            output = self.parallel.call(self.callbacks.forward, chunk, micro_batch, ctx)
            if samples:
                results.append((samples, output))
        return gather_columns(batch, results, tuple(wanted), top_k)

    def step(
        self, batch: Batch, loss: LossFunction | None = None, lr: float | None = None
    ) -> dict[str, tuple[float, float]]:
        self.drop_gradients()
        totals = self.compute_gradients(batch, loss or self.callbacks.loss)
        try:
            stepped = self._apply(lr)
        except NonFiniteError as error:
            tokens = trained_tokens(batch, self.sum)
            raise NonFiniteError(
                f"{self._find_nonfinite(batch, loss or self.callbacks.loss, tokens)} found by computing the step again, because {error}"
            ) from error
        return self.step_metrics(totals, stepped)

    def accumulate_gradients(self, batch: Batch, loss: LossFunction | None = None) -> dict[str, tuple[float, float]]:
        return as_floats(self.compute_gradients(batch, loss or self.callbacks.loss))

    def apply_gradients(self, lr: float | None = None) -> dict[str, tuple[float, float]]:
        try:
            return self.step_metrics({}, self._apply(lr))
        finally:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()

    def compute_gradients(self, batch: Batch, loss: LossFunction) -> dict[str, tuple[Tensor, Tensor]]:
        """Add the gradients of all micro-batches to the held ones; return the sums of their metrics."""
        tokens = trained_tokens(batch, self.sum)
        totals: dict[str, tuple[Tensor, Tensor]] = {}
        for samples, micro_batch, ctx in self.micro_batches(batch, "train", self.config.entropy):
            output = self.parallel.call(self.callbacks.forward, self.model, micro_batch, ctx)
            share = with_auxiliary(loss(output, micro_batch, ctx), output, tokens)
            if share.value.requires_grad:
                self.optimizer.scale(share.value).backward()
            if samples:
                add_pairs(totals, share.metrics | ctx.metrics)
        return totals

    def _apply(self, lr: float | None) -> dict[str, float]:
        self.optimizer.fixed_lr = lr
        self.optimizer.unscale()
        return self.callbacks.optimizer_step()

    def _find_nonfinite(self, batch: Batch, loss: LossFunction, tokens: Tensor) -> str:
        """Describe the first non-finite tensor of a failed step on any rank."""
        again = ((micro_batch, ctx) for _, micro_batch, ctx in self.micro_batches(batch, "train", self.config.entropy))
        forward = partial(self.parallel.call, self.callbacks.forward, self.model)
        found = first_nonfinite_in_step(self.model, again, len(self.split(batch)), forward, loss, tokens)
        self.optimizer.zero_grad()
        # collective: every rank must compute all micro-batches before one raises
        return self.parallel.first_text(found) or "each micro-batch is finite, so their sum overflows"

    def step_metrics(
        self, totals: dict[str, tuple[Tensor, Tensor]], stepped: dict[str, float]
    ) -> dict[str, tuple[float, float]]:
        """Return the metrics of a step: sums over its micro-batches, expert loads, and metrics of the optimizer step."""
        metrics = as_floats(totals) | self.loads.take(self.sum)
        return metrics | {f"train/{name}": (value, 1.0) for name, value in stepped.items()}

    def split(self, batch: Batch) -> list[list[int]]:
        """Return the samples of each micro-batch of a step, as indices in ``batch``."""
        return split(batch, self.config.micro_batch_size, self.config.max_tokens, self.config.share_prompts)

    def micro_batches(self, batch: Batch, kind: Pass, entropy: bool) -> Iterator[tuple[list[int], Batch, Context]]:
        """Yield the micro-batches of a pass: sample indices, and the results of ``prepare``. If forward calls are collective, ranks with
        fewer micro-batches yield additional ones without samples, which train nothing.

        Args:
            batch: this rank's samples of the step.
            kind: kind of the pass.
            entropy: whether the pass needs the entropy.
        """
        splits = self.split(batch)
        idle = self.parallel.max_count(len(splits)) - len(splits) if self.parallel.in_step else 0
        for samples in splits:
            yield samples, *self.prepare(batch, samples, kind, entropy)
        for _ in range(idle):
            yield [], *self.prepare(idle_sample(batch), [0], kind, entropy)

    def prepare(self, batch: Batch, samples: list[int], kind: Pass, entropy: bool) -> tuple[Batch, Context]:
        """Pack one micro-batch on the model's device, and make the context for ``forward``. Arguments as for ``micro_batches``;
        ``samples`` are the indices of the micro-batch's samples, one entry of ``split``."""
        micro_batch = batch if samples == list(range(len(batch))) else batch.select(samples)
        packing = pack_grown(micro_batch, self.config.share_prompts and shares(self.model, micro_batch), self._switch)
        micro_batch = micro_batch.to(self.device)
        names = ("rows", "positions", "row_of", "sources", "targets")
        moved: dict[str, Any] = {name: to_device(getattr(packing, name), self.device) for name in names}
        packing = replace(packing, **moved)
        ctx = Context(kind, self.layers, packing.rows, recompute=self.config.recompute and kind == "train")
        ctx.sources, ctx.targets = packing.sources, packing.targets
        ctx.attached.update(self._attached, packing=packing, entropy=entropy)
        return micro_batch, ctx

    @contextmanager
    def scoring_with(self, model: nn.Module | None = None, attached: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Make ``log_probs`` of the policy use another model of this process, or further context entries, inside this context.

        Args:
            model: prepared like the trainer's own; None keeps the current model.
            attached: further entries of every pass's ``Context.attached``.
        """
        before = self._scored, self._attached
        self._scored, self._attached = model or self._scored, {**self._attached, **(attached or {})}
        try:
            yield
        finally:
            self._scored, self._attached = before

    def emulate(
        self, emulation: Emulation, codec: Codec, snapshot: Snapshot | None = None
    ) -> AbstractContextManager[None]:
        return emulate_properties(self.model, self.scoring_with, emulation, codec, snapshot)

    def rebuild(self, precision: str) -> None:
        if self.precision is None:
            raise RuntimeError("this trainer was built without a precision that can change")
        self.precision.switch(precision)

    def sleep(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        self.optimizer.zero_grad()
        if "weights" in parts and not self._asleep["weights"]:
            if self.precision is not None:
                self.precision.forget()
            models = [m for m in (self.model, self._reference) if m is not None]
            held = [p for m in models for p in m.parameters()]
            self._asleep["weights"].release([*(local_shard(p).tensor for p in held), *constant_tensors(held)])
        if "optimizer" in parts and not self._asleep["optimizer"]:
            self._asleep["optimizer"].release(self.optimizer.memory())

    def wake(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        for part in parts:
            self._asleep[part].restore()

    def quantizer(self, format: Format) -> FormatItself:
        """Return the format's own quantizer; this trainer defines no other code."""
        precision, shapes = self.precision, linear_shapes(self.model)
        if precision is not None and precision.rounds_gradients:
            shapes += [(k, n) for n, k in shapes]  # gradients are multiplied by transposed weights
        return FormatItself(format, None if precision is None else precision.product_of(self.model), shapes)

    def model_facts(self) -> Mapping[str, Any]:
        return facts_of(self.model)

    def sum(self, value: Tensor) -> Tensor:
        return self.parallel.sum(value)

    def configure(self, settings: Mapping[str, float]) -> None:
        self.optimizer.configure(settings)

    def reset_optimizer(self) -> None:
        self.optimizer.reset()

    def units(self, everywhere: bool = False) -> Iterator[WeightUnit]:
        """See ``Trainer.units``; rank 0 yields them. Views of the model's memory, which the next step changes."""
        with drain(export(self.model)) as units:
            yield from (unit for unit in units if everywhere or self.world.rank == 0)

    def find_memory(self) -> Hashable:
        """See ``Trainer.find_memory``; None for sharded parameters, which are gathered for each sync."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            return None
        return tuple([(tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors])

    def export(self, directory: Path, tokenizer: Any, units: Iterator[WeightUnit] | None = None) -> None:
        """See ``Trainer.export``; rank 0 writes."""
        with drain(self.units() if units is None else units) as stream:
            if self.world.rank == 0:
                export_checkpoint(self.model, tokenizer, directory, units=stream)

    def save(self, directory: Path) -> None:
        checkpoint.save(self.model, self.optimizer, Path(directory), self.world)

    def load(self, directory: Path) -> None:
        """See ``Trainer.load``; CheckpointError if ``directory`` belongs to another model."""
        checkpoint.load(self.model, self.optimizer, Path(directory), self.world)


def _no_loss(output: Output, micro_batch: Batch, ctx: Context) -> Any:
    raise RuntimeError("no loss was bound to this trainer (see Trainer.bind)")
