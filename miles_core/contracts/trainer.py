"""The trainer contract: computes log-probabilities, runs optimiser steps, and exports, saves and loads weights.

A trainer controls its own execution (micro-batches, pipeline stages, sharded ranks) and calls three functions that the algorithm
defines: ``forward`` for one micro-batch through one model chunk, ``loss`` on the last stage, and ``optimizer_step`` once. Core
composes them with the plugins' wrappers and passes them to ``bind``.

Every method is a collective, called on every trainer rank. All ranks of one model replica (tensor, pipeline, context parallel)
receive the same samples and return the same complete columns and metrics. Data-parallel ranks receive different samples, possibly
none. A trainer may add micro-batches with an all-zero ``loss_mask``, so that all ranks run the same number of micro-batches. For
these, ``forward`` and ``loss`` return a zero loss that depends on the model's output, so that a backward pass is possible.
``miles_testing.TrainerContract`` tests the contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.data.batch import Batch, find_column_fault, find_pair_fault, is_pair
from miles_core.data.weight_unit import WeightUnit
from miles_core.data.world import ALONE, World
from miles_core.errors import MilesError, describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from miles_core.precision.codec import Codec
    from miles_core.precision.format import Format
    from miles_core.precision.quantizer import Quantizer
    from miles_core.precision.snapshot import Snapshot

#: Kind of a forward pass: under the old or the reference policy, in training, or to score tokens.
Pass = Literal["old", "ref", "train", "verify", "rollout"]
#: Parts of a trainer's device memory that ``sleep`` can release independently.
TrainerPart = Literal["weights", "optimizer"]
ALL_PARTS: tuple[TrainerPart, ...] = ("weights", "optimizer")

#: Keys of ``Context.attached`` for trainers with the capability ``routing_replay``. A wrapper sets ``GIVEN_ROUTES`` to the experts to
#: use: [physical tokens, expert layers, k] int64, for all expert layers of the model. The trainer's forward computes with these experts,
#: also in a recomputation, and sets ``OWN_ROUTES`` to the choices of its own routers for the chunk's layers: index among the model's
#: expert layers -> [physical tokens, k]; an empty dict for a chunk without routers.
GIVEN_ROUTES, OWN_ROUTES = "routes.given", "routes.own"


@dataclass
class Context:
    """The pass of one micro-batch through one model chunk.

    Attributes:
        kind: kind of pass. ``old``, ``ref`` and ``verify`` run without gradient.
        layers: global indices of the decoder layers in this chunk.
        rows: [physical tokens] for each row of the hidden states between layers on this rank (the input of a router), its index
            in the micro-batch's flat columns. Accounts for packing, shared prompts, and sequence and context parallelism. -1 marks
            a padding row. ``take`` indexes a column with ``rows``.
        recompute: whether activation checkpointing recomputes the chunk's layers in the backward pass.
        attached: values that plugins attach for this pass. The context is passed with the call, so a recomputation in the backward
            thread uses the same values; modules must not store them. Backends whose layers accept no extra argument pass the
            context only to wrappers.
        extras: declared field name -> [physical tokens, ...], recorded by modules in this call. An engine keeps them for the rows
            of requests that requested the field.
        metrics: (sum, weight) pairs reported by wrappers; the trainer adds them to the step's metrics.
        wanted: names of the columns to compute; see ``Trainer.columns``.
        top_k: number of tokens per position in ``top_tokens`` and ``top_log_probs``.
        sources: [targets] index of the physical row whose output predicts each target; None if the backend does not provide it.
        targets: [targets] flat index of each position where ``loss_mask`` is not 0.
    """

    kind: Pass
    layers: tuple[int, ...]
    rows: Tensor
    recompute: bool = False
    attached: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    wanted: frozenset[str] = frozenset({"log_probs"})
    top_k: int = 0
    sources: Tensor | None = None
    targets: Tensor | None = None

    def take(self, column: Tensor, pad: float | int) -> Tensor:
        """Convert a column [T, ...] to this chunk's rows [physical tokens, ...]; padding rows hold ``pad``."""
        values = column[self.rows.clamp(min=0)]
        values[self.rows < 0] = pad
        return values

    def at_targets(self, rows: Tensor, tokens: int) -> Tensor:
        """Convert values of physical rows to a flat column [tokens, ...] at the tokens they predict; 0 where ``loss_mask`` is 0.

        A prompt shared by several samples is computed once; its last row predicts the first response token of each sample.

        Args:
            rows: [physical tokens, ...], for example a head's output for the last hidden states.
            tokens: number of flat tokens in the micro-batch.

        Raises:
            MilesError: this backend does not provide ``sources`` and ``targets``.
        """
        if self.sources is None or self.targets is None:
            raise MilesError("this trainer does not report which row predicts which token (Context.sources)")
        values = rows.new_zeros(tokens, *rows.shape[1:])
        return values.index_put((self.targets,), rows.index_select(0, self.sources))


@dataclass
class Output:
    """The output of one chunk for one micro-batch of T flat tokens. Per-token entries are 0 where ``loss_mask`` is 0.

    Attributes:
        log_probs: [T] float32; None before the last pipeline stage. Complete on every context-parallel rank; gradients reach only
            the rows computed on this rank.
        entropy: [T] float32 in nats; None unless requested.
        values: [T] float32 from a critic's head, the value of the state in which each target is chosen; None without a head.
        top_tokens: [T, k] int32 most probable tokens; None unless requested.
        top_log_probs: [T, k] float32 log-probabilities of ``top_tokens``.
        log_normalizer: [T] float32, logits minus log-probabilities over the whole vocabulary; None unless requested.
        candidate_log_probs: [T, k] float32 log-probabilities of the tokens in the batch's column ``candidates``, over the full vocabulary
            at the sampling temperature, with gradient in the pass ``train``; None without that column. Capability ``candidates``.
        hidden: activations for the next pipeline stage; None after the last.
        aux: auxiliary losses, name -> (sum over this micro-batch's trained tokens including the coefficient, number of those
            tokens). Divided by the token count of the whole step. A backend that differentiates such a loss inside its own
            backward pass scales it by the same count and reports it as a metric instead.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    top_tokens: Tensor | None = None
    top_log_probs: Tensor | None = None
    log_normalizer: Tensor | None = None
    candidate_log_probs: Tensor | None = None
    hidden: Tensor | None = None
    aux: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def find_fault(self, batch: Batch, ctx: Context) -> str:
        """Describe the first column without the micro-batch's shape and device, or another invalid entry; "" if there is none."""
        for name in ("log_probs", "entropy"):
            column = getattr(self, name)
            if column is not None and (fault := find_column_fault(name, column, batch.tokens)):
                return fault
        trains = ctx.kind == "train" and torch.is_grad_enabled()
        if trains and self.log_probs is not None and not self.log_probs.requires_grad:
            return "log_probs has no gradient; return what the inner function computed, without detach()"
        for name, pair in self.aux.items():
            if not is_pair(pair):
                return f"aux[{name!r}] is {describe(pair)}; expected (sum, weight), two 0-d tensors"
        return find_pair_fault(ctx.metrics)


@dataclass
class Loss:
    """The loss of one micro-batch.

    Attributes:
        value: the micro-batch's share of the step's loss, already divided by the normalisers of the whole step; shares are summed.
        metrics: (sum, weight) pairs, which core averages over the step.
    """

    value: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def find_fault(self) -> str:
        """Describe what is not a 0-d value with a gradient, or an invalid metric; "" if the loss is valid."""
        if not isinstance(self.value, Tensor) or self.value.dim():
            return f"Loss.value is {describe(self.value)}; expected a 0-d Tensor, the micro-batch's share of the loss"
        if torch.is_grad_enabled() and not self.value.requires_grad:
            return "Loss.value has no gradient; compute it from output.log_probs, without detach() or item()"
        return find_pair_fault(self.metrics)


class Forward(Protocol):
    """``forward(chunk, micro_batch, ctx) -> Output``. ``chunk`` is the trainer's model (or one pipeline chunk of it)."""

    def __call__(self, chunk: nn.Module, micro_batch: Batch, ctx: Context, /) -> Output: ...


#: A function that computes the loss of a micro-batch, ``loss(output, micro_batch, ctx)``; ``wrap_loss`` wraps it.
LossFunction = Callable[[Output, Batch, Context], Loss]
OptimizerStep = Callable[[], dict[str, float]]


@dataclass
class Callbacks:
    """The composed functions that a trainer calls."""

    forward: Forward
    loss: LossFunction
    optimizer_step: OptimizerStep


class Trainer(ABC):
    """A training backend."""

    capabilities: frozenset[str] = frozenset()
    #: this rank and its replica among all trainer ranks of the policy
    world: World = ALONE
    callbacks: Callbacks

    def bind(self, callbacks: Callbacks) -> None:
        """Set the composed callbacks; called once, before any pass."""
        self.callbacks = callbacks

    @property
    @abstractmethod
    def chunks(self) -> list[nn.Module]:
        """The model chunks of this rank."""

    @abstractmethod
    def forward(self, chunk: nn.Module, micro_batch: Batch, ctx: Context) -> Output:
        """Run the trainer's own forward pass, without plugin wrappers."""

    @abstractmethod
    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradients and run the optimiser; returns metrics (``grad_norm``, ``lr``).

        A non-finite gradient norm raises NonFiniteError and changes neither weights nor optimiser.
        """

    @abstractmethod
    def log_probs(self, batch: Batch, kind: Pass, entropy: bool = False) -> dict[str, Tensor]:
        """Compute ``{"log_probs": [T], "entropy": [T]}`` without gradient through ``callbacks.forward``. ``ref`` uses the reference weights."""

    def columns(self, batch: Batch, kind: Pass, wanted: Collection[str], top_k: int = 0) -> dict[str, Tensor]:
        """Compute columns [T, ...] in a pass without gradient; entries are 0 except at targets.

        Args:
            wanted: any of ``log_probs``, ``entropy``, ``values`` (critics), ``log_normalizer``, ``top_tokens`` and ``top_log_probs``
                (the ``top_k`` most probable tokens).

        Raises:
            MilesError: this backend or the model's head does not provide a requested column.
        """
        if unknown := sorted({*wanted} - {"log_probs", "entropy"}):
            raise MilesError(f"{type(self).__name__} does not compute {', '.join(unknown)}; use another --trainer")
        return self.log_probs(batch, kind, "entropy" in wanted)

    @abstractmethod
    def step(
        self, batch: Batch, loss: LossFunction | None = None, lr: float | None = None
    ) -> dict[str, tuple[float, float]]:
        """Run one optimiser step over ``batch`` (all samples of this rank), split into micro-batches that the trainer chooses.

        Gradients are summed, never averaged. For a supervised warm start, ``loss`` replaces ``callbacks.loss``, and ``lr`` replaces the
        scheduled learning rate, in which case the schedule does not advance.

        Returns:
            (sum, weight) pairs over the samples of this replica; the learner handle adds them over replicas.
        """

    def accumulate_gradients(self, batch: Batch, loss: LossFunction | None = None) -> dict[str, tuple[float, float]]:
        """Add the gradients of ``batch`` to those held since the last ``apply_gradients``: the first half of ``step``, which may be
        repeated. An auxiliary loss is divided by the tokens of each call. Requires the capability ``divisible_step``.

        Returns:
            (sum, weight) pairs, as ``step`` does, without the metrics of the optimiser.
        """
        raise MilesError(
            f"{type(self).__name__} computes an optimiser step as a whole and cannot hold gradients between calls; use a --trainer with the "
            "capability divisible_step"
        )

    def apply_gradients(self, lr: float | None = None) -> dict[str, tuple[float, float]]:
        """Run the optimiser on the held gradients, and drop them: the second half of ``step``. ``lr`` as for ``step``.

        Raises:
            NonFiniteError: the gradient norm is not finite; neither weights nor optimiser have changed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no capability divisible_step")

    def drop_gradients(self) -> None:
        """Drop the held gradients; ``step`` and ``load`` do so, too."""

    @abstractmethod
    def reset_optimizer(self) -> None:
        """Reset the optimiser's moments and the learning-rate schedule (after a warm start)."""

    def configure(self, settings: Mapping[str, float]) -> None:
        """Change the optimizer from the next step on: ``lr``, ``min_lr``, ``weight_decay``, ``clip_grad``, ``adam_beta1``, ``adam_beta2``,
        ``adam_eps``. Moments and the position in the schedule stay."""
        raise MilesError(f"{type(self).__name__} cannot change the settings of its optimizer while running")

    @abstractmethod
    def units(self, everywhere: bool = False) -> Iterator[WeightUnit]:
        """Yield the model's weights for export; see ``WeightUnit``. A collective: every rank must consume its iterator to the end.

        Exactly one rank yields each unit, for example one rank per pipeline stage and expert-parallel rank; or every rank if
        ``everywhere``. Ranks that yield nothing declare it (``World.sends``).
        """

    def find_memory(self) -> Hashable:
        """Identify the memory of ``units``: if the result is equal to an earlier one, ``units`` yields the same lasting tensors in the same
        memory, with values that may have changed. None if this is unknown."""
        return None

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, optimiser, schedule and random-number states of all ranks to ``directory``, which exists, in the trainer's own format."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore the state that ``save`` wrote; a trainer of a frozen model restores its weights only."""

    @abstractmethod
    def export(
        self, directory: Path, tokenizer: PreTrainedTokenizerBase | None, units: Iterator[WeightUnit] | None = None
    ) -> None:
        """Write a Hugging Face checkpoint.

        Args:
            directory: target directory; must not exist or must be empty.
            tokenizer: the tokenizer to save; None saves none.
            units: the weights to write, ``units(everywhere=True)`` after the plugins' wrappers; None writes the trainer's weights.
                A collective: every rank must consume it to the end, even after a failure.
        """

    def emulate(
        self, emulation: Emulation, codec: Codec, snapshot: Snapshot | None = None
    ) -> AbstractContextManager[None]:
        """Context in which ``log_probs`` of the policy applies ``emulation``.

        Args:
            emulation: the switches.
            codec: the rollout's codec.
            snapshot: the weights for ``emulation.snapshot``.

        Raises:
            MilesError: this backend does not support a switch; names it.
        """
        if emulation == AS_TRAINED:
            return nullcontext()
        chosen = [f.name for f in fields(emulation) if getattr(emulation, f.name) != f.default]
        raise MilesError(
            f"{type(self).__name__} cannot score tokens as the engine does (emulation: {', '.join(chosen)}); leave the comparison out, or use "
            "another --trainer"
        )

    def quantizer(self, format: Format) -> Quantizer | None:
        """Return this backend's implementation of a number format, with the parity it declares.

        None for a format that the backend does not declare (capability ``format:NAME``), which the plan refuses.
        """
        return None

    def model_facts(self) -> Mapping[str, object]:
        """Return facts about the trained model; see ``Engine.model_facts``."""
        return {}

    def rebuild(self, precision: str) -> None:
        """Change the precision of the computation (the name of a number format, or ``bf16``), starting with the next pass.

        Used by a precision warm-up. Requires the capability ``rebuild``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot change its precision while running: leave --warmup-steps out"
        )

    def sleep(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        """Move the contents of ``parts`` to host memory and release their device memory, so that an engine can use the device.

        ``optimizer`` includes everything except model weights: master weights, moments and gradients. Called between other calls, never
        during a pass. Parts that already sleep are unaffected. Used by ``--colocate``. Requires the capability ``sleep``.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot give its memory back: leave --colocate out")

    def wake(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        """Undo ``sleep``: restore the same values bit for bit, possibly at other addresses.

        ``log_probs``, ``units``, ``export`` and ``rebuild`` need the weights awake, every other call both parts. Parts that are awake are
        unaffected.
        """

    def sum(self, value: Tensor) -> Tensor:
        """Sum ``value`` over replicas (data-parallel), using one rank of each; the identity with one replica."""
        return value

    def close(self) -> None:
        """Release processes and memory."""
