"""The embedded trainer: a Transformers model in this process, packed micro-batches, AdamW.

A micro-batch goes through the model as one row of tokens (``packing``), attention knows the tree (``attention``), only trained
positions meet ``lm_head`` (``logprobs``). How samples are dealt into micro-batches changes the time and the memory of a step,
never its result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.contracts.emulation import Emulation
from miles_core.contracts.trainer import Callbacks, Context, LossFunction, Output, Pass, Trainer, TrainerPart
from miles_core.data.batch import Batch, Ragged
from miles_core.data.field import CANDIDATES, SAMPLING_SUPPORT
from miles_core.data.means import add, as_floats
from miles_core.data.unit import Unit
from miles_core.errors import ConfigError, MilesError, NonFiniteError
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format
from miles_core.precision.quantizer import FormatItself
from miles_core.precision.snapshot import Snapshot
from miles_core.train.auxiliary import trained_tokens, with_auxiliary
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.configuration import text_configuration
from miles_embedded.model.export import export_checkpoint
from miles_embedded.model.growing_rope import rope_switch
from miles_embedded.model.load import backbone, decoder_layers, facts_of
from miles_embedded.model.logprobs import head_log_probs, scatter, top_log_probs
from miles_embedded.model.released import Released
from miles_embedded.model.sharded import held
from miles_embedded.model.value_head import value_head, values_of
from miles_embedded.model.views import export
from miles_embedded.quantized.linear import linear_shapes
from miles_embedded.quantized.trained import TrainedPrecision
from miles_embedded.trainer import checkpoint
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.balance import Balance
from miles_embedded.trainer.data_parallel import Alone
from miles_embedded.trainer.emulate import emulating
from miles_embedded.trainer.expert_loads import Loads
from miles_embedded.trainer.nonfinite import first_nonfinite_in_step
from miles_embedded.trainer.optimizer import MakeOptimizer, Optimizer
from miles_embedded.trainer.packing import Packing, spans
from miles_embedded.trainer.split import idle_sample, split
from miles_embedded.trainer.twice import pack_grown

#: What ``EmbeddedTrainer.columns`` knows.
COLUMNS = ("log_probs", "entropy", "values", "top_tokens", "top_log_probs")


@dataclass(frozen=True)
class TrainerConfig:
    """Attributes:
    optimizer: see ``OptimizerConfig``.
    temperature: of the rollout; log-probs are those of the distribution that was sampled.
    micro_batch_size: samples a micro-batch.
    max_tokens: computed tokens a micro-batch, instead of ``micro_batch_size``.
    share_prompts: compute what the samples of a group start with once.
    recompute: recompute the layers' activations in the backward pass.
    aux_loss_coef: coefficient of the load-balancing loss; 0 is off.
    entropy: give the loss the entropy at trained positions.
    trains: False for a frozen model, which gets no optimizer.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    temperature: float = 1.0
    micro_batch_size: int | None = 8
    max_tokens: int | None = None
    share_prompts: bool = True
    recompute: bool = False
    aux_loss_coef: float = 0.0
    entropy: bool = False
    trains: bool = True


class EmbeddedTrainer(Trainer):
    """A trainer of one Transformers model, in this process or together with others.

    Args:
        model: prepared by ``miles_embedded.model.load``.
        config: see ``TrainerConfig``.
        reference: makes the reference model for ``kind="ref"`` when it is first asked for.
        precision: of the models, where it may change.
        parallel: how it trains with other processes, each of which has such a trainer and is called alike.
        optimizer: makes the optimizer of parameter groups; AdamW by default.

    Raises:
        ConfigError: no parameter of a model that is to be trained has a gradient.
    """

    capabilities = frozenset(
        {"entropy", "sampling_support", "rebuild", "sleep", "values", "top_log_probs", "candidates", "optimizers"}
    )

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        reference: Callable[[], nn.Module] | None = None,
        precision: TrainedPrecision | None = None,
        parallel: Alone | None = None,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.model = model
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
        self.parallel.divide(model)
        self.optimizer = Optimizer(model, config.optimizer, self.parallel, optimizer)
        self.balance = Balance(model, config.aux_loss_coef) if config.aux_loss_coef > 0 else None
        self.loads = Loads(model)
        self._make_reference = reference
        self._reference: nn.Module | None = None
        if config.recompute:
            _recompute_layers(model)
        self._switch = rope_switch(model)
        self._scored: nn.Module | None = None
        self._asleep: dict[TrainerPart, Released] = {"weights": Released(keep=True), "optimizer": Released(keep=True)}
        self._attached: dict[str, Any] = {}
        self.callbacks = Callbacks(self.forward, _no_loss, self.optimizer_step)

    @property
    def chunks(self) -> list[nn.Module]:
        """One: the model."""
        return [self.model]

    @property
    def device(self) -> torch.device:
        """Where the model is that ``log_probs`` and ``step`` compute with."""
        return next((self._scored or self.model).parameters()).device

    @property
    def reference(self) -> nn.Module:
        """The reference model, loaded now if it was not."""
        if self._reference is None:
            if self._make_reference is None:
                raise RuntimeError("this trainer was built without a reference model")
            reference = self._make_reference().to(self.device).requires_grad_(False).eval()
            self.parallel.divide(reference)
            self._reference = reference
        return self._reference

    def forward(self, chunk: Any, micro_batch: Batch, ctx: Context) -> Output:
        """Log-probs at trained positions; ``ctx.attached`` may carry ``entropy`` (bool) to ask for the entropy."""
        packing: Packing = ctx.attached["packing"]
        call = PackedCall(ctx, packing)
        watch = self.balance if ctx.kind == "train" else None
        if watch is not None:
            watch.open(ctx)
        if ctx.kind == "train":
            self.loads.open(ctx, packing)
        hidden = backbone(chunk)(
            input_ids=micro_batch.tokens[ctx.rows].unsqueeze(0),
            position_ids=packing.positions.unsqueeze(0),
            use_cache=False,
            call=call,
        ).last_hidden_state[0]
        self.loads.close(ctx)
        aux = {} if watch is None else watch.close(ctx, micro_batch, packing)
        return replace(self.predict(chunk, hidden, micro_batch, ctx), aux=aux)

    def predict(self, model: nn.Module, hidden: Tensor, micro_batch: Batch, ctx: Context) -> Output:
        """Final hidden states [rows, hidden] -> log-probs and what else ``ctx`` wants of them; of a critic, values."""
        packing: Packing = ctx.attached["packing"]
        sources, length = hidden.index_select(0, packing.sources), len(micro_batch.tokens)
        if (critic := value_head(model)) is not None:
            return Output(values=scatter(values_of(critic, sources), packing.targets, length))
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
        tokens, best = None, None
        if ctx.top_k:
            tokens, best = top_log_probs(model, sources, ctx.top_k, self.config.temperature)
        return Output(
            top_tokens=None if tokens is None else scatter(tokens, packing.targets, length),
            top_log_probs=None if best is None else scatter(best, packing.targets, length),
            log_probs=scatter(log_probs, packing.targets, length),
            entropy=None if entropy is None else scatter(entropy, packing.targets, length),
            candidate_log_probs=None if others is None else scatter(others, packing.targets, length),
        )

    def optimizer_step(self) -> dict[str, float]:
        """See ``Trainer.optimizer_step``."""
        return self.optimizer.step()

    def log_probs(self, batch: Batch, kind: Pass, entropy: bool = False) -> dict[str, Tensor]:
        """See ``Trainer.log_probs``."""
        return self.columns(batch, kind, ("log_probs", "entropy") if entropy else ("log_probs",))

    @torch.no_grad()
    def columns(self, batch: Batch, kind: Pass, wanted: Collection[str], top_k: int = 0) -> dict[str, Tensor]:
        """See ``Trainer.columns``."""
        chunk = self.reference if kind == "ref" else self._scored or self.model
        given = {"values"} if value_head(chunk) is not None else {*COLUMNS} - {"values"}
        if lacking := sorted({*wanted} - given):
            raise MilesError(
                f"this model gives {', '.join(sorted(given))} and not {', '.join(lacking)}: a policy of the role critic has a value head "
                "in place of its output layer, and no other has one"
            )
        if top_k > text_configuration(chunk).vocab_size:
            raise MilesError(f"top_k is {top_k}, and the model knows {text_configuration(chunk).vocab_size} tokens")
        results = []
        for samples, micro_batch, ctx in self.micro_batches(batch, kind, "entropy" in wanted):
            ctx.wanted, ctx.top_k = frozenset(wanted), top_k if "top_tokens" in wanted else 0
            output = self.parallel.call(self.callbacks.forward, chunk, micro_batch, ctx)
            if samples:
                results.append((samples, output))
        return self._gathered(batch, results, tuple(wanted), top_k)

    def step(
        self, batch: Batch, loss: LossFunction | None = None, lr: float | None = None
    ) -> dict[str, tuple[float, float]]:
        """See ``Trainer.step``."""
        loss = loss or self.callbacks.loss
        tokens = trained_tokens(batch, self.sum)
        totals: dict[str, tuple[Tensor, Tensor]] = {}
        self.optimizer.zero_grad()
        self.optimizer.fixed_lr = lr
        for samples, micro_batch, ctx in self.micro_batches(batch, "train", self.config.entropy):
            output = self.parallel.call(self.callbacks.forward, self.model, micro_batch, ctx)
            share = with_auxiliary(loss(output, micro_batch, ctx), output, tokens)
            if share.value.requires_grad:
                share.value.backward()
            if samples:
                add_pairs(totals, share.metrics | ctx.metrics)
        try:
            stepped = self.callbacks.optimizer_step()
        except NonFiniteError as error:
            found = first_nonfinite_in_step(self, batch, loss, tokens)
            raise NonFiniteError(f"{found} found by computing the step again, because {error}") from error
        return self.step_metrics(totals, stepped)

    def step_metrics(
        self, totals: dict[str, tuple[Tensor, Tensor]], stepped: dict[str, float]
    ) -> dict[str, tuple[float, float]]:
        """What ``step`` returns: the sums over its micro-batches, the loads of experts, and what the optimiser step said."""
        metrics = as_floats(totals) | self.loads.take(self.sum)
        return metrics | {f"train/{name}": (value, 1.0) for name, value in stepped.items()}

    def split(self, batch: Batch) -> list[list[int]]:
        """The samples of each micro-batch of a step, as positions in ``batch``."""
        return split(batch, self.config.micro_batch_size, self.config.max_tokens, self.config.share_prompts)

    def micro_batches(self, batch: Batch, kind: Pass, entropy: bool) -> Iterator[tuple[list[int], Batch, Context]]:
        """The micro-batches of a pass: samples, and what ``prepare`` makes of them. Where ranks go in step, those with fewer
        get further ones without samples, which train nothing.

        Args:
            batch: this rank's samples of the step.
            kind: which pass it is.
            entropy: whether the pass asks for the entropy.
        """
        splits = self.split(batch)
        idle = self.parallel.most(len(splits)) - len(splits) if self.parallel.in_step else 0
        for samples in splits:
            yield samples, *self.prepare(batch, samples, kind, entropy)
        for _ in range(idle):
            yield [], *self.prepare(idle_sample(batch), [0], kind, entropy)

    def prepare(self, batch: Batch, samples: list[int], kind: Pass, entropy: bool) -> tuple[Batch, Context]:
        """One micro-batch on the model's device, packed, and the context that ``forward`` wants with it.

        Args:
            batch: the step's.
            samples: those of the micro-batch, one entry of ``split``.
            kind: which pass it is for.
            entropy: whether the pass asks for the entropy.
        """
        micro_batch = batch if samples == list(range(len(batch))) else batch.select(samples)
        packing = pack_grown(micro_batch, self.config.share_prompts, self._switch)
        micro_batch = micro_batch.to(self.device)
        packing = replace(
            packing,
            **{n: getattr(packing, n).to(self.device) for n in ("rows", "positions", "row_of", "sources", "targets")},
        )
        ctx = Context(kind, self.layers, packing.rows, recompute=self.config.recompute and kind == "train")
        ctx.sources, ctx.targets = packing.sources, packing.targets
        ctx.attached.update(self._attached, packing=packing, entropy=entropy)
        return micro_batch, ctx

    @contextmanager
    def scoring_with(self, model: nn.Module | None = None, attached: Mapping[str, Any] | None = None) -> Iterator[None]:
        """While this is open, ``log_probs`` of the policy computes with another model of this process, and its passes find more.

        Args:
            model: prepared like the trainer's own; None leaves it to the trainer's own.
            attached: further entries of every pass's ``Context.attached``.
        """
        before = self._scored, self._attached
        self._scored, self._attached = model or self._scored, {**self._attached, **(attached or {})}
        try:
            yield
        finally:
            self._scored, self._attached = before

    def emulating(
        self, emulation: Emulation, codec: Codec, snapshot: Snapshot | None = None
    ) -> AbstractContextManager[None]:
        """See ``Trainer.emulating``."""
        return emulating(self, emulation, codec, snapshot)

    def rebuild(self, precision: str) -> None:
        """See ``Trainer.rebuild``."""
        if self.precision is None:
            raise RuntimeError("this trainer was built without a precision that can change")
        self.precision.switch(precision)

    def sleep(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        """See ``Trainer.sleep``."""
        self.optimizer.zero_grad()
        if "weights" in parts and not self._asleep["weights"]:
            if self.precision is not None:
                self.precision.forget()
            models = [m for m in (self.model, self._reference) if m is not None]
            self._asleep["weights"].release(held(p).tensor for m in models for p in m.parameters())
        if "optimizer" in parts and not self._asleep["optimizer"]:
            self._asleep["optimizer"].release(self.optimizer.memory())

    def wake(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        """See ``Trainer.wake``."""
        for part in parts:
            self._asleep[part].restore()

    def quantizer(self, format: Format) -> FormatItself:
        """There is no other code here than the format's own."""
        product = None if self.precision is None else self.precision.products.of(format, self.model)
        return FormatItself(format, product, linear_shapes(self.model))

    def model_facts(self) -> Mapping[str, Any]:
        """See ``Trainer.model_facts``."""
        return facts_of(self.model)

    def sum(self, value: Tensor) -> Tensor:
        """See ``Trainer.sum``."""
        return self.parallel.sum(value)

    def reset_optimizer(self) -> None:
        """See ``Trainer.reset_optimizer``."""
        self.optimizer.reset()

    def units(self, everywhere: bool = False) -> Iterator[Unit]:
        """See ``Trainer.units``; the first rank yields them. Views of the model's memory, changed by the next step."""
        with _exhausted(export(self.model)) as units:
            for unit in units:
                if everywhere or self.world.rank == 0:
                    yield unit

    def export(self, directory: Path, tokenizer: Any, units: Iterator[Unit] | None = None) -> None:
        """See ``Trainer.export``; the first rank writes."""
        with _exhausted(self.units() if units is None else units) as stream:
            if self.world.rank == 0:
                export_checkpoint(self.model, tokenizer, directory, units=stream)

    def save(self, directory: Path) -> None:
        """See ``Trainer.save``."""
        checkpoint.save(self.model, self.optimizer, Path(directory), self.world)

    def load(self, directory: Path) -> None:
        """See ``Trainer.load``; CheckpointError when ``directory`` holds another model."""
        checkpoint.load(self.model, self.optimizer, Path(directory), self.world)

    def _gathered(
        self, batch: Batch, results: list[tuple[list[int], Output]], names: tuple[str, ...], top_k: int = 0
    ) -> dict[str, Tensor]:
        """The micro-batches' results in the batch's own order."""
        home = batch.tokens.device
        out = {}
        for name in names:
            parts = [getattr(output, name).to(home) for _, output in results]
            more = (top_k,) if name.startswith("top_") else ()
            kind = parts[0].dtype if parts else torch.int32 if name == "top_tokens" else torch.float32
            out[name] = torch.zeros(len(batch.tokens), *more, dtype=kind, device=home)
            for (samples, _), values in zip(results, parts, strict=True):
                out[name][_flat(batch, samples)] = values
        return out


@contextmanager
def _exhausted(units: Iterator[Unit]) -> Iterator[Iterator[Unit]]:
    """Read to the end what was left: other ranks wait for this one with each unit, also when it fails half-way."""
    try:
        yield units
    finally:
        for _ in units:
            pass


def add_pairs(totals: dict[str, tuple[Tensor, Tensor]], pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Add the (sum, weight) pairs of one micro-batch to those of its step, in float64."""
    add(totals, {name: (_double(total), _double(weight)) for name, (total, weight) in pairs.items()})


def _double(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()


def _flat(batch: Batch, samples: list[int]) -> Tensor:
    """Flat positions of these samples' tokens, in their order."""
    starts, lengths = (column.cpu().numpy()[samples] for column in (batch.starts, batch.lengths))
    return torch.from_numpy(spans(starts, lengths)).to(batch.tokens.device)


def _recompute_layers(model: nn.Module) -> None:
    named: Any = model
    enable = getattr(named, "activation_checkpointing_enable", None) or named.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # Transformers recomputes layers only in training mode. The layers alone are put there: their children, dropout
    # among them, stay in evaluation mode, since a policy's log-probs must not be random.
    for layer in decoder_layers(model):
        layer.training = True


def _no_loss(output: Output, micro_batch: Batch, ctx: Context) -> Any:
    raise RuntimeError("no loss was bound to this trainer (see Trainer.bind)")
