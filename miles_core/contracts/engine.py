"""The engine contract: token ids in, token ids and log-probabilities out.

An engine may live in this process, or stand in front of servers that are spoken to over a socket. Every
method may be called only between ``start`` and ``stop``. ``miles_testing.EngineContract`` is the executable form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from miles_core.data.unit import Encoded
    from miles_core.precision.format import Format
    from miles_core.precision.quantizer import Quantizer

PauseMode = Literal["abort", "retract", "in_place"]
#: What an engine holds in the memory of its device, and can give back apart from each other.
EnginePart = Literal["weights", "cache"]


@dataclass(frozen=True)
class Sampling:
    """How to sample. ``temperature`` 0 is greedy; ``top_k`` -1 and ``top_p`` 1.0 are off; the order is joint: both limits
    are taken on the temperature-scaled full distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def truncated(self) -> bool:
        """True when the sampled distribution has a smaller support than the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)


@dataclass
class Request:
    """One continuation to generate.

    Attributes:
        tokens: the prompt, never empty.
        sampling: see ``Sampling``.
        key: of the engine call (``rollout.keys``), unique among requests in flight; random numbers depend on (run seed, key,
            position) alone. A request that continues an aborted one has its key.
        extras: names of declared fields to record, e.g. ``{"sampling_support"}``; an engine that cannot record one
            lacks the capability and is refused at planning.
        group: requests with one number share a prompt; a front of several engines sends them to one.
        policy: name of the policy that answers; "" is the first one that trains.
        metadata: plugin's own, passed through untouched.
    """

    tokens: list[int]
    sampling: Sampling
    key: int = 0
    group: int = 0
    extras: set[str] = field(default_factory=set)
    metadata: dict[str, Any] = field(default_factory=dict)
    policy: str = ""


@dataclass
class Response:
    """What came back.

    Attributes:
        tokens: the new token ids (a stop token included).
        log_probs: [len(tokens)] at the sampling temperature (greedy: 1): over the support when ``sampling_support`` was
            requested, else over the full vocabulary.
        finish: ``stop`` (end or stop token, stop string), ``length`` or ``abort``.
        text: the decoded new text, cut before a stop string.
        weight_versions: (index into ``tokens`` of the first one, version), in order.
        extras: field name -> rows: for ``token-1`` fields len(prompt) + len(tokens) - 1, for ``response`` ones len(tokens).
        metrics: engine's own numbers about this request; their means over a step's requests are the metrics ``engine/NAME``.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length", "abort"]
    text: str = ""
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Engine(ABC):
    """A rollout engine. ``capabilities`` are those of the manifest: ``routed_experts``, ``sampling_support``, ``score``,
    ``token_versions``, ``draft``, ``keyed_sampling``, ``rebuild``, ``shared_storage``, ``sleep``, and ``transport:NAME`` for each transport
    whose messages ``receive`` takes."""

    capabilities: frozenset[str] = frozenset()
    #: type its cache keeps keys and values in, "" for the model's own
    kv_cache_dtype: str = ""
    #: whether tensor cores read the codes of its quantised layers, and it can emulate them (``emulated_products``)
    native_products: bool = False
    #: how many processes take what this one is told to ``receive``
    receivers: int = 1
    #: gives this engine the learner's weights again, under the version that they have; set by a runtime that has learner and
    #: engine in one process. An engine whose model lives in a process of its own, and dies there, starts it anew, awaits this
    #: and asks again for what was in flight; without it, it raises ``WorkerLost`` without a name.
    resend: Callable[[], Awaitable[None]] | None = None

    def hot_update(self, format: str) -> Literal["in_place", "via_disk", "restart"]:
        """How weights stored in ``format`` ("" for BF16) can change while the engine runs."""
        return "in_place"

    def quantizer(self, format: Format) -> Quantizer | None:
        """This backend's own code for a number format, with the parity it declares; None when it declares nothing,
        which stops a run in that format (``mismatch.parity``)."""
        return None

    def model_facts(self) -> Mapping[str, object]:
        """What it serves, as facts: ``model.num_experts`` and the others of ``same_model.COMPARED``, read from the
        ``config.json`` (or the modules) it was started with; compared with the trainer's before the run. Empty when
        the backend cannot say. Called after ``start``."""
        return {}

    def emulated_products(self) -> AbstractContextManager[None]:
        """While this is open, quantised layers compute with emulated products; with ``native_products`` only."""
        raise NotImplementedError(f"{type(self).__name__} cannot switch its products")

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        """Take one message of a transport in another process: plain data whose meaning the two agree on (names and
        shapes of a bucket about to be broadcast, memory handles, a path). Sent between ``pause`` and ``resume``, perhaps before
        this has returned for the one before; with ``last`` the engine serves ``version``. After a failure only a complete new update
        makes it usable. ``miles_transport.Arrivals`` takes buckets of encoded tensors (transport ``buckets``). SyncError: they
        did not come as they were sent."""
        raise NotImplementedError(f"{type(self).__name__} takes weights in its own process only")

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights in force; -1 before the first ``update_weights``."""

    @abstractmethod
    async def start(self) -> None:
        """Bring the engine up."""

    @abstractmethod
    async def stop(self) -> None:
        """Release everything."""

    @abstractmethod
    async def generate(self, request: Request) -> Response:
        """Continue one request; many calls may be in flight, the engine batches them."""

    @abstractmethod
    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        """log p(token t | tokens before) for t >= 1 of each sequence, [len - 1] float32, full vocabulary.
        Capability ``score``; a temperature other than 1 also needs ``score_temperature`` and raises MilesError without."""

    async def score_each(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> Mapping[str, list[np.ndarray]]:
        """``score`` by every engine that this one stands for: worker's name -> its scores; "" is this engine itself."""
        return {"": await self.score(sequences, temperature)}

    @abstractmethod
    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        """Take encoded tensors, all of them, as ``version``. In-flight requests must be
        paused or absent."""

    async def share_weights(self, units: Iterable[Encoded], version: int) -> int:
        """As ``update_weights``, and from then on the engine reads tensors that travel as they are and are ``lasting`` where
        they lie, in the trainer's memory: an update that finds them there copies nothing of them. Returns the bytes that were
        copied. For an engine in the trainer's process that never generates while the trainer steps; capability ``shared_storage``.
        With it an engine in another process also reads ``lasting`` tensors of a message that it is to ``receive`` where they lie."""
        raise NotImplementedError(f"{type(self).__name__} keeps weights of its own")

    @abstractmethod
    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop stepping. ``abort`` returns every request with finish ``abort``; ``retract`` drops their cache and resumes
        them from their tokens under the next weights; ``in_place`` keeps the cache. New requests wait for ``resume``. Core
        pauses around every update of the weights; an engine that is paused already stays so until the first ``resume``."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after ``pause``."""

    @abstractmethod
    async def abort(self, keys: Collection[int] | None = None) -> None:
        """Return requests in flight with finish ``abort`` and their partial results: those with these keys (others go on, and
        a key that is not in flight is none's), or all. An engine that is paused stays paused."""

    async def sleep(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        """Give the device memory of these parts back, so that a trainer on the same device can use it; what sleeps already stays
        so. In-flight requests must be paused in a mode that keeps no cache, or absent. No request is computed until both parts
        are awake. Weights that lie in the trainer's memory (``share_weights``) are not the engine's to give. Capability
        ``sleep``; nothing to do by default."""

    async def wake(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        """Undo ``sleep``, in one call or ``weights`` first, so that an update needs no cache beside it. Weights that slept hold
        nothing defined until the next update; those that did not are still served."""

    async def rebuild(self, precision: str) -> None:
        """Serve weights in another precision (a number format's name, or ``bf16``) from the next ``update_weights`` on, which
        must follow. In-flight requests must be paused or absent. Capability ``rebuild``."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot change its precision while running: leave --warmup-steps out"
        )
