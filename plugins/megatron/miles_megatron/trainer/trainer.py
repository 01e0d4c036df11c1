"""The trainer: runs Megatron-Core's schedules over packed micro-batches and calls core's callbacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from torch.nn.functional import pad

from miles_core.data import SAMPLING_SUPPORT, Batch, Ragged, WeightUnit
from miles_core.plugin import MilesError
from miles_core.trainer import (
    Callbacks,
    Context,
    LossFunction,
    MtpRequest,
    Output,
    Pass,
    Trainer,
    TrainerPart,
    World,
    trained_tokens,
    with_auxiliary,
)
from miles_formats import Codec, Format, Quantizer
from miles_megatron import plugin
from miles_megatron.architecture import Architecture
from miles_megatron.recipes import ROWS
from miles_megatron.sizes import Sizes
from miles_megatron.trainer import checkpoint
from miles_megatron.trainer.context import sum_over_context
from miles_megatron.trainer.device_memory import DeviceMemory
from miles_megatron.trainer.flight import Flight, flatten, merge, reduce_metrics, split_into_flights
from miles_megatron.trainer.logprobs import head_on, token_log_probs, whole_rows
from miles_megatron.trainer.matrices import offer_matrices
from miles_megatron.trainer.model import (
    ADD_IN_PLACE,
    build_chunks,
    fused_attention,
    has_transformer_engine,
    in_bf16,
    layer_numbers,
    transformer_config,
)
from miles_megatron.trainer.mtp import Mtp
from miles_megatron.trainer.optimizer import Optimizer
from miles_megatron.trainer.packing import Packing
from miles_megatron.trainer.precision import TrainedFormat
from miles_megatron.trainer.products import add_gradients_in_place, multiply_experts_together, sort_once
from miles_megatron.trainer.quantizers import make_quantizer
from miles_megatron.trainer.routers import Routers
from miles_megatron.trainer.settings import Settings
from miles_megatron.trainer.value_head import NAME as VALUE_HEAD
from miles_megatron.trainer.value_head import add_head, values_of
from miles_megatron.trainer.weights import Weights
from miles_megatron.trainer.without_cuda import without_cuda

#: Key in ``Context.attached`` of the last hidden states of a pass.
_LAST = "megatron.last"


def _on_cpu_too(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method that calls Megatron-Core, so that it also works without CUDA."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with without_cuda():
            return method(*args, **kwargs)

    return call


class MegatronTrainer(Trainer):
    """One rank of a trainer that uses Megatron-Core.

    Args:
        a: the architecture.
        s: parallel sizes.
        world: rank and data-parallel rank; the process groups must exist.
        directory: checkpoint of the initial weights.
        reference: checkpoint of the reference model.
        on_chunk: called with each chunk before it is wrapped.
        codec: codec of the number format to train in; BF16 by default.
        mtp: how to train the checkpoint's MTP layer; None to leave it untrained.
        head: makes the value head of a critic for the last chunk; None for a model that predicts tokens.
    """

    capabilities = frozenset(c.name for c in plugin.list_capabilities("trainer"))

    @_on_cpu_too
    def __init__(
        self,
        a: Architecture,
        s: Sizes,
        world: World,
        directory: Path,
        settings: Settings,
        reference: Path | None = None,
        on_chunk: Callable[[nn.Module], object] = lambda chunk: None,
        codec: Codec | None = None,
        mtp: MtpRequest | None = None,
        head: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.a, self.s, self.world, self.settings = a, s, world, settings
        self.source, self._reference = directory, reference
        self.config = transformer_config(a, s, settings.dtype, settings.model)
        plain = build_chunks(a, s, self.config, settings.longest)
        self.mtp = None if mtp is None else Mtp(mtp, a, s, self.config, plain)
        modules: list[nn.Module] = plain if self.mtp is None else [*plain, self.mtp.layer]
        if a.qk_norm == "whole":  # sharded by head, but Megatron-Core would sum the gradients by name
            self.config.qk_layernorm = False
        sort_once(modules, s)
        if has_transformer_engine():
            if settings.model.get(ADD_IN_PLACE, True):
                add_gradients_in_place(modules)
            if not self.config.fp8:
                multiply_experts_together(modules, notify=bool(settings.reduction.get("overlap_grad_reduce")))
        self.weights = Weights(plain, a, s, None if self.mtp is None else self.mtp.layer)
        self.weights.load(directory)
        self.world = replace(world, sends=self.weights.sends)
        self.format = TrainedFormat(self.weights, modules, codec or Codec())
        self.predicts = ("log_probs", "entropy") if head is None else ("values",)
        for chunk in plain:
            if head is not None:
                add_head(chunk, head, a.tied)
            offer_matrices(self.weights, chunk, on_chunk)
        self.wrapped = [self._wrap(chunk, one_bucket=i > 0) for i, chunk in enumerate(plain)]
        self._chunks = plain
        self.routers = Routers(plain, a, settings.balance)
        self.optimizer = Optimizer(self.wrapped, settings.adamw, settings.dtype, settings.optimizer)
        if self.mtp is not None:
            wrapped = self._wrap(self.mtp.layer, overlap_grad_reduce=False)
            self.mtp.wrap(wrapped, settings.adamw, settings.dtype, settings.optimizer)
        self._memory = self._device_memory()
        self._state = checkpoint.TrainerState(plain, self.weights, self.optimizer, self.mtp, self.world)
        self.config.finalize_model_grads_func = _finalize
        self.config.no_sync_func = [c.no_sync for c in self.wrapped] if s.virtual > 1 else self.wrapped[0].no_sync
        self.config.grad_scale_func = self.optimizer.inner.scale_loss
        self.callbacks = Callbacks(self.forward, _no_loss, self.optimizer_step)

    def _device_memory(self) -> DeviceMemory:
        both: list[Any] = [self] if self.mtp is None else [self, self.mtp]
        wrapped = [] if self.mtp is None else [self.mtp.wrapped]
        copied = [] if self.weights.copy is None else [self.weights.copy]
        return DeviceMemory([*self.wrapped, *wrapped], [each.optimizer for each in both], copied)

    def _wrap(self, module: nn.Module, one_bucket: bool = True, **fixed: Any) -> Any:
        """Wrap a module so that its gradients are summed over replicas."""
        inner = in_bf16(self.config, module) if self.settings.dtype == torch.bfloat16 else module
        reduction = {"grad_reduce_in_fp32": True, **self.settings.reduction, **fixed}
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, **reduction)
        return DistributedDataParallel(self.config, config, inner, disable_bucketing=one_bucket)

    @property
    def chunks(self) -> list[nn.Module]:
        """The chunks without Megatron-Core's wrappers, as plugins receive them."""
        return list(self._chunks)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self._chunks[0].parameters()).device

    def forward(self, chunk: Any, micro_batch: Batch, ctx: Context) -> Output:
        """Run one chunk. The last chunk returns log-probs and entropies, the others hidden states."""
        from megatron.core.packed_seq_params import PackedSeqParams

        packing: Packing = ctx.attached["packing"]
        # padding rows (-1) read token 0. Indexing with a mask would need a device synchronisation
        tokens = pad(micro_batch.tokens, (0, 1))[packing.rows]
        bounds = packing.bounds
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=packing.longest, max_seqlen_kv=packing.longest)
        wrapped = self.wrapped[self._chunks.index(chunk)]
        with self.routers.activate(micro_batch, ctx):
            found: Tensor = wrapped(
                tokens.unsqueeze(0),
                packing.positions.unsqueeze(0),
                None,
                packed_seq_params=packed,
                output_processor=self._predict,
                output_processor_context=(micro_batch, ctx),
            )
        if found.dim() == 3:
            return Output(hidden=found)
        length, entropy = len(micro_batch.tokens), bool(ctx.attached["entropy"])
        whole = sum_over_context(found.new_zeros(length, 2).index_copy(0, packing.targets, found))
        if self.predicts == ("values",):
            return Output(values=whole[:, 0])
        output = Output(log_probs=whole[:, 0], entropy=whole[:, 1] if entropy else None)
        if self.mtp is not None and ctx.kind == "train":
            output.aux[self.mtp.request.loss] = self.mtp.loss(ctx.attached[_LAST], micro_batch, packing, packed)
        return output

    def _predict(
        self, hidden_states: Tensor, output_layer: Any, output_weight: Any, context: Any, **rest: Any
    ) -> Tensor:
        """Return [M, 2]: log-probs and entropies (a critic: values and 0) at the rows of this rank that predict trained tokens. Called by
        the last chunk."""
        micro_batch, ctx = context
        packing: Packing = ctx.attached["packing"]
        if self.predicts == ("values",):
            values = values_of(getattr(self._chunks[-1], VALUE_HEAD), hidden_states, packing.sources, self.s.sequence)
            return torch.stack([values, torch.zeros_like(values)], 1)
        hidden = whole_rows(hidden_states, self.s.sequence)
        if self.mtp is not None and ctx.kind == "train":
            ctx.attached[_LAST] = hidden.detach()
        support = micro_batch.columns.get(SAMPLING_SUPPORT.name)
        weight = output_layer.weight if output_weight is None else output_weight
        return token_log_probs(
            head_on(weight, self.a.vocab, self.settings.temperature),
            hidden.index_select(0, packing.sources),
            micro_batch.tokens[packing.targets],
            support.select(packing.targets) if isinstance(support, Ragged) else None,
            bool(ctx.attached["entropy"]),
        )

    def optimizer_step(self) -> dict[str, float]:
        """See ``Trainer.optimizer_step``."""
        mtp, rate = self.mtp, self.optimizer.rate
        found = {"grad_norm": self.optimizer.norm(), "lr": rate}
        if mtp is not None:
            norm = found[f"grad_norm/{mtp.request.group}"] = mtp.optimizer.norm()
            mtp.step(norm, rate)
        self.optimizer.step(found["grad_norm"], rate)
        return found

    def log_probs(self, batch: Batch, kind: Pass, entropy: bool = False) -> dict[str, Tensor]:
        """See ``Trainer.log_probs``."""
        return self.columns(batch, kind, ("log_probs", "entropy") if entropy else ("log_probs",))

    @_on_cpu_too
    def columns(self, batch: Batch, kind: Pass, wanted: Collection[str], top_k: int = 0) -> dict[str, Tensor]:
        """See ``Trainer.columns``."""
        if lacking := sorted({*wanted} - {*self.predicts}):
            raise MilesError(
                f"this model computes {', '.join(self.predicts)} and not {', '.join(lacking)}: a critic has a value head in place of its "
                "output layer, and --trainer megatron has no other columns"
            )
        flights = self._flights(batch, kind, "entropy" in wanted)
        model = self.weights.as_reference(self._reference) if kind == "ref" else nullcontext()
        with torch.no_grad(), model, self.format.quantized_weights():
            self._run(flights, None)
        return flatten(batch, flights, tuple(wanted))

    @_on_cpu_too
    def step(
        self, batch: Batch, loss: LossFunction | None = None, lr: float | None = None
    ) -> dict[str, tuple[float, float]]:
        """See ``Trainer.step``."""
        self.optimizer.fixed_lr = lr
        flights = self._flights(batch, "train", self.settings.entropy)
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        if self.mtp is not None:
            self.mtp.begin()
        loss, tokens = loss or self.callbacks.loss, trained_tokens(batch, self.sum).to(self.device)
        self.routers.begin(tokens)
        with self.format.quantized_weights():
            self._run(flights, lambda output, micro, ctx: with_auxiliary(loss(output, micro, ctx), output, tokens))
        if self.mtp is not None:
            self.mtp.finish()
        spread = self.routers.end()
        stepped = self.callbacks.optimizer_step()
        metrics = {name: (float(total), float(weight)) for name, (total, weight) in reduce_metrics(flights).items()}
        return metrics | spread | {f"train/{name}": (value, 1.0) for name, value in stepped.items()}

    def _flights(self, batch: Batch, kind: Pass, entropy: bool) -> list[Flight]:
        settings = self.settings
        rows = ROWS if self.config.fp8 else 1
        return split_into_flights(
            batch, self.s, settings.micro_batch_size, settings.max_tokens, kind, entropy, self.device, rows
        )

    def _run(self, flights: list[Flight], loss: LossFunction | None) -> None:
        """Run all micro-batches through Megatron-Core's schedule; without ``loss``, forward only."""
        train = loss is not None
        recompute = train and self.config.recompute_granularity is not None

        def forward_step(iterator: Iterator[Flight], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            flight, plain = next(iterator), self._chunks[self.wrapped.index(chunk)]
            ctx = flight.context(layer_numbers(plain), self.s, recompute)
            output = self.callbacks.forward(plain, flight.micro_batch, ctx)

            def finish(tensor: Tensor, non_loss_data: bool = False) -> Any:
                if loss is None:
                    flight.output = output
                    return None
                share = loss(output, flight.micro_batch, ctx)
                flight.metrics = merge(flight.metrics, share.metrics)
                return share.value, torch.zeros((), dtype=torch.int, device=tensor.device), None

            flight.shares = merge(flight.shares, ctx.metrics)
            sent = next(x for x in (output.log_probs, output.values, output.hidden) if x is not None)
            return sent, finish

        iterators = [iter(flights) for _ in self.wrapped]
        with fused_attention():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.wrapped if len(self.wrapped) > 1 else self.wrapped[0],
                num_microbatches=len(flights),
                seq_length=int(flights[0].packing.bounds[-1]),
                micro_batch_size=1,
                forward_only=not train,
                collect_non_loss_data=not train,
            )

    def reset_optimizer(self) -> None:
        """See ``Trainer.reset_optimizer``."""
        self.optimizer.reset()
        if self.mtp is not None:
            self.mtp.optimizer.reset()

    def units(self, everywhere: bool = False) -> Iterator[WeightUnit]:
        """See ``Trainer.units``."""
        return self.weights.units(everywhere)

    def sleep(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        """See ``Trainer.sleep``."""
        if "optimizer" in parts:
            self.optimizer.inner.zero_grad()
            if self.mtp is not None:
                self.mtp.optimizer.inner.zero_grad()
        self._memory.release(parts)

    def wake(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        """See ``Trainer.wake``."""
        self._memory.restore(parts)

    def quantizer(self, format: Format) -> Quantizer | None:
        """See ``Trainer.quantizer``."""
        return make_quantizer(format)

    def rebuild(self, precision: str) -> None:
        """See ``Trainer.rebuild``."""
        self.format.switch(precision)

    def model_facts(self) -> Mapping[str, object]:
        """See ``Trainer.model_facts``."""
        found: dict[str, object] = {"layers": self.a.layers, "vocab_size": self.a.vocab, "hidden_size": self.a.hidden}
        if (e := self.a.experts) is not None:
            found |= {"num_experts": e.count, "top_k": e.top_k, "moe_layers": sum(self.a.sparse)}
        return found

    def sum(self, value: Tensor) -> Tensor:
        """See ``Trainer.sum``."""
        if self.world.replicas == 1:
            return value
        total = value.to(self.device, copy=True)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=False))
        return total.to(value.device)

    def configure(self, settings: Mapping[str, float]) -> None:
        """See ``Trainer.configure``."""
        self.optimizer.configure(settings)

    @_on_cpu_too
    def save(self, directory: Path) -> None:
        """See ``Trainer.save``."""
        checkpoint.save(self._state, Path(directory))

    @_on_cpu_too
    def load(self, directory: Path) -> None:
        """See ``Trainer.load``. Raises CheckpointError if ``directory`` contains another model."""
        checkpoint.load(self._state, Path(directory))

    def export(self, directory: Path, tokenizer: Any, units: Iterator[WeightUnit] | None = None) -> None:
        """See ``Trainer.export``."""
        own = self.units(everywhere=self.s.pp * self.s.ep > 1) if units is None else units
        checkpoint.export(self.weights, own, self.source, Path(directory), tokenizer)


def _finalize(chunks: list[Any], num_tokens: Any = None, **groups: Any) -> None:
    """Sum gradients over replicas, over pipeline stages that share the embedding, and over ranks that share norms.
    Gradients are not divided, because losses are already normalised over the whole step."""
    finalize_model_grads(chunks, None, **groups)


def _no_loss(*_: Any) -> Any:
    raise RuntimeError("the trainer has not been given its callbacks (Trainer.bind)")
