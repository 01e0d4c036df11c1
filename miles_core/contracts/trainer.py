"""The trainer contract: log-probabilities, one optimiser step, weights out, save and load.

A trainer owns its schedule (plain micro-batches, pipeline stages, sharded ranks) and calls back for what the algorithm
decides: ``forward`` for one micro-batch through one model chunk, ``loss`` on the last stage, ``optimizer_step``
once. Core composes those three with the plugins' wrappers and hands them over in ``bind``. Every method is a collective,
called on every trainer rank. All ranks of one model replica (tensor, pipeline, context parallel) are given the same samples
and return the same complete columns and metrics; data-parallel ranks have different samples, perhaps none. A trainer may add
micro-batches that train nothing (``loss_mask`` all 0), so that all ranks run equally many: ``forward`` and ``loss`` then
return a zero that is connected to the model's output. ``miles_testing.TrainerContract`` is the executable form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.data.batch import Batch
from miles_core.data.unit import Unit
from miles_core.data.world import ALONE, World
from miles_core.errors import MilesError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from miles_core.precision.codec import Codec
    from miles_core.precision.format import Format
    from miles_core.precision.quantizer import Quantizer
    from miles_core.precision.snapshot import Snapshot

Pass = Literal["old", "ref", "train", "verify", "rollout"]
#: What a trainer holds in the memory of its device, and can give back apart from each other.
TrainerPart = Literal["weights", "optimizer"]
ALL_PARTS: tuple[TrainerPart, ...] = ("weights", "optimizer")

#: Keys of ``Context.attached`` between a wrapper that knows which experts to use and a trainer with the capability
#: ``routing_replay``. Given: [physical tokens, layers with experts, k] int64, for all such layers of the model. The trainer's forward
#: computes with these, in a recomputation too, and leaves what its own routers would have chosen: number of the layer among those
#: with experts -> [physical tokens, k], of the chunk's layers; an empty dict for a chunk without routers.
GIVEN_ROUTES, OWN_ROUTES = "routes.given", "routes.own"


@dataclass
class Context:
    """One micro-batch's passage through one model chunk.

    Attributes:
        kind: which pass this is. ``old``, ``ref`` and ``verify`` run without gradient.
        layers: global numbers of the decoder layers this chunk holds.
        rows: [physical tokens] for each row of the hidden states between layers on this rank (what a router sees), its
            index in the micro-batch's flat columns (packing, sharing and sequence or context parallelism all end
            here). -1 marks a padding row; ``take`` looks a column up.
        recompute: activation checkpointing runs the chunk's layers again in the backward pass.
        attached: values that plugins attach for the duration of this pass. The context travels with the call, so a
            recomputation in the backward thread sees the same values; modules must not keep any. A backend whose layers
            take no call object shows it to wrappers only.
        extras: declared field name -> [physical tokens, ...] that modules recorded in this call; an engine keeps them for
            the rows of requests that asked for that field.
        metrics: (sum, weight) pairs that wrappers report; the trainer adds them to those of its step.
        wanted: what the pass is to compute; see ``Trainer.columns``.
        top_k: how many tokens ``top_tokens`` and ``top_log_probs`` have at each position.
        sources: [targets] the physical row whose output predicts each target; None where a backend keeps that to itself.
        targets: [targets] flat index of each position with a loss mask.
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
        """A column [T, ...] as this chunk's rows [physical tokens, ...]; padding rows hold ``pad``."""
        found = column[self.rows.clamp(min=0)]
        found[self.rows < 0] = pad
        return found

    def at_targets(self, rows: Tensor, tokens: int) -> Tensor:
        """What each physical row says of the tokens that it predicts, as a flat column: [tokens, ...], 0 where ``loss_mask`` is 0.
        A prompt that samples share is computed once, and its last row then predicts a token of each of them.

        Args:
            rows: [physical tokens, ...], for example a head's output for the last hidden states.
            tokens: how many flat tokens the micro-batch has.

        Raises:
            MilesError: this backend does not tell which row predicts which token.
        """
        if self.sources is None or self.targets is None:
            raise MilesError("this trainer does not tell which row predicts which token (Context.sources)")
        found = rows.new_zeros(tokens, *rows.shape[1:])
        return found.index_put((self.targets,), rows.index_select(0, self.sources))


@dataclass
class Output:
    """What one chunk returns for one micro-batch of T flat tokens.

    Attributes:
        log_probs: [T] float32 at target positions where ``loss_mask`` is not 0, else 0; None before the last stage.
            Complete on every context-parallel rank; the gradient reaches only the rows computed there.
        entropy: [T] float32 in nats, likewise; None unless asked for.
        values: [T] float32 of a critic's head: at each target the value of the state in which it is chosen; None without a head.
        top_tokens: [T, k] int32 most probable tokens, likewise; None unless asked for.
        top_log_probs: [T, k] float32, theirs.
        candidate_log_probs: [T, k] float32 of the tokens in the batch's column ``candidates``, over the whole vocabulary at the sampling
            temperature, with gradient in the pass ``train``; None in a batch without that column. Capability ``candidates``.
        hidden: activations for the next stage; None after the last.
        aux: auxiliary losses, name -> (sum over this micro-batch's trained tokens, coefficient included; number of
            those tokens). Divided by the whole step's token count. A backend that differentiates such a loss inside
            its own backward scales it by the same count and reports it as a metric, not here.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    top_tokens: Tensor | None = None
    top_log_probs: Tensor | None = None
    candidate_log_probs: Tensor | None = None
    hidden: Tensor | None = None
    aux: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass
class Loss:
    """A micro-batch's share of the step's loss (already divided by whole-step normalisers, so shares are summed) and
    metrics as (sum, weight) pairs, averaged over the step by core."""

    value: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Forward(Protocol):
    """``forward(chunk, micro_batch, ctx) -> Output``. ``chunk`` is the trainer's model (or one pipeline chunk of it)."""

    def __call__(self, chunk: nn.Module, micro_batch: Batch, ctx: Context, /) -> Output: ...


LossFunction = Callable[[Output, Batch, Context], Loss]
OptimizerStep = Callable[[], dict[str, float]]


@dataclass
class Callbacks:
    """The composed functions a trainer's schedule calls back."""

    forward: Forward
    loss: LossFunction
    optimizer_step: OptimizerStep


class Trainer(ABC):
    """A training backend."""

    capabilities: frozenset[str] = frozenset()
    #: this rank among those that train the policy
    world: World = ALONE
    callbacks: Callbacks

    def bind(self, callbacks: Callbacks) -> None:
        """Take the composed callbacks; called once, before any pass."""
        self.callbacks = callbacks

    @property
    @abstractmethod
    def chunks(self) -> list[nn.Module]:
        """The model chunks this rank holds."""

    @abstractmethod
    def forward(self, chunk: nn.Module, micro_batch: Batch, ctx: Context) -> Output:
        """The innermost forward, before any plugin wraps it."""

    @abstractmethod
    def optimizer_step(self) -> dict[str, float]:
        """Clip and step; returns metrics (``grad_norm``, ``lr``). A non-finite gradient norm raises NonFiniteError, and then
        nothing has changed."""

    @abstractmethod
    def log_probs(self, batch: Batch, kind: Pass, entropy: bool = False) -> dict[str, Tensor]:
        """``{"log_probs": [T], "entropy": [T]}`` without gradient, through ``callbacks.forward``. ``ref`` uses the reference weights."""

    def columns(self, batch: Batch, kind: Pass, wanted: Collection[str], top_k: int = 0) -> dict[str, Tensor]:
        """What a pass without gradient finds at each target, [T, ...] and 0 elsewhere: ``log_probs``, ``entropy``, ``values`` (of a
        critic), ``top_tokens`` and ``top_log_probs`` (the ``top_k`` most probable tokens).

        Raises:
            MilesError: this backend, or the model's head, does not give one of them.
        """
        if unknown := sorted({*wanted} - {"log_probs", "entropy"}):
            raise MilesError(f"{type(self).__name__} does not compute {', '.join(unknown)}; use another --trainer")
        return self.log_probs(batch, kind, "entropy" in wanted)

    @abstractmethod
    def step(
        self, batch: Batch, loss: LossFunction | None = None, lr: float | None = None
    ) -> dict[str, tuple[float, float]]:
        """One optimiser step over ``batch`` (all of this rank's samples), split into micro-batches as the trainer
        sees fit. Gradients are summed, never averaged. ``loss`` replaces ``callbacks.loss`` and ``lr`` the schedule's rate,
        which then does not advance (supervised warm start). Returns (sum, weight) pairs over this replica's samples;
        the learner handle adds replicas."""

    @abstractmethod
    def reset_optimizer(self) -> None:
        """Forget the optimiser's moments and the schedule's position (after a warm start)."""

    @abstractmethod
    def units(self, everywhere: bool = False) -> Iterator[Unit]:
        """The model copy for export; see ``Unit``. A collective that every rank exhausts. Each unit is yielded by one
        rank of the world (one rank a pipeline stage has something to send), or with ``everywhere`` by each of them."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, optimiser, schedule and random-number state of all ranks into ``directory``, in any form
        that ``load`` reads; ``export`` is for others."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Inverse of ``save``."""

    @abstractmethod
    def export(
        self, directory: Path, tokenizer: PreTrainedTokenizerBase | None, units: Iterator[Unit] | None = None
    ) -> None:
        """Write a Hugging Face checkpoint, with the tokenizer where one is given.

        Args:
            directory: must not exist, or be empty.
            tokenizer: None to leave it out.
            units: the weights to write, in place of the trainer's own: what plugins made of ``units(everywhere=True)``. A collective that
                every rank reads to its end, also after a failure.
        """

    def emulating(
        self, emulation: Emulation, codec: Codec, snapshot: Snapshot | None = None
    ) -> AbstractContextManager[None]:
        """While this is open, ``log_probs`` of the policy computes as ``emulation`` says; ``codec`` is the rollout's and
        ``snapshot`` the weights of its switch of that name. MilesError names a switch that this backend does not have."""
        if emulation == AS_TRAINED:
            return nullcontext()
        raise MilesError(f"{type(self).__name__} cannot compute as the engine does")

    def quantizer(self, format: Format) -> Quantizer | None:
        """This backend's own code for a number format, with the parity it declares; None when it declares nothing,
        which stops a run in that format (``mismatch.parity``)."""
        return None

    def model_facts(self) -> Mapping[str, object]:
        """What it trains, as facts; see ``Engine.model_facts``."""
        return {}

    def rebuild(self, precision: str) -> None:
        """Compute in another precision (a number format's name, or ``bf16``) from the next pass on. Asked for by a precision
        warm-up. Capability ``rebuild``."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot change its precision while running: leave --warmup-steps out"
        )

    def sleep(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        """Give the device memory of these parts back, so that an engine on the same device can use it; what they hold is kept in
        host memory. ``optimizer`` is everything that belongs to no weight of a model: masters, moments, gradients. Between two
        calls, never inside a pass; what sleeps already stays so. Asked for by ``--colocate``. Capability ``sleep``."""
        raise NotImplementedError(f"{type(self).__name__} cannot give its memory back: leave --colocate out")

    def wake(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        """Undo ``sleep``: the same numbers, bit for bit, in tensors that may lie elsewhere. ``log_probs``, ``units``, ``export``
        and ``rebuild`` need the weights awake, every other call all of it. What is awake stays so."""

    def sum(self, value: Tensor) -> Tensor:
        """Add over data-parallel ranks, one rank of each replica; identity with one replica."""
        return value

    def close(self) -> None:
        """Release processes and memory."""
