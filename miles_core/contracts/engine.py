"""The engine contract: generates tokens and their log-probabilities from token ids.

An engine may run in this process or be a client of servers in other processes. All other methods may be called only between
``start`` and ``stop``. ``miles_testing.EngineContract`` tests the contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from miles_core.data.column import FLOATS, TOKENS, Column, ColumnField, as_column, find_token_fault
from miles_core.errors import MilesError, describe

if TYPE_CHECKING:
    import torch

    from miles_core.data.media import Media
    from miles_core.data.weight_unit import Encoded
    from miles_core.precision.format import Format, Stored
    from miles_core.precision.quantizer import Quantizer

#: What an engine does with requests in flight during a weight sync (``--pause-generation-mode``).
PauseMode = Literal["abort", "retract", "in_place"]
#: Parts of an engine's device memory that ``sleep`` can release independently.
EnginePart = Literal["weights", "cache"]
Finish = Literal["stop", "length", "abort"]
FINISHES = get_args(Finish)
#: Largest log-probability that rounding explains.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    ``temperature`` 0 is greedy; ``top_k`` -1 and ``top_p`` 1.0 are off. ``top_k`` and ``top_p`` both apply to the full
    temperature-scaled distribution, not one after the other.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def truncated(self) -> bool:
        """Whether sampling is restricted to part of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)


@dataclass
class Request:
    """One continuation to generate. Lists of token ids become columns.

    Attributes:
        tokens: the prompt's token ids, never empty.
        sampling: the sampling parameters.
        key: key of the engine call (``rollout.requests``), unique among requests in flight; random numbers depend only on (run seed,
            key, position). A request that continues an aborted request has the same key.
        extras: names of declared fields to record, e.g. ``{"sampling_support"}``. The plan is rejected if the engine lacks the
            corresponding capability.
        group: group index; requests of one group share a prompt, and a pool of several engines sends them to the same engine.
        policy: name of the policy that generates; "" is the first policy that trains.
        metadata: plugin data, passed through unchanged.
        media: what belongs to the placeholders in ``tokens``, in order. Only engines with the capability ``media`` receive any.
    """

    tokens: ColumnField
    sampling: Sampling
    key: int = 0
    group: int = 0
    extras: set[str] = field(default_factory=set)
    metadata: dict[str, Any] = field(default_factory=dict)
    policy: str = ""
    media: tuple[Media, ...] = ()

    def __post_init__(self) -> None:
        self.tokens = as_column(self.tokens, TOKENS)

    def find_fault(self, vocabulary: int, declared: Collection[str]) -> str:
        """Describe the first invalid value; "" if the request has a prompt, valid sampling, and extras that are ``declared`` fields."""
        if not self.tokens or not isinstance(self.tokens, (list, Column)):
            return f"tokens that are {describe(self.tokens)}; expected a list of token ids"
        self.tokens = as_column(self.tokens, TOKENS)  # a plugin may have set a list
        if fault := find_token_fault(self.tokens, vocabulary):
            return fault
        if not isinstance(self.sampling, Sampling) or self.sampling.max_new_tokens < 1:
            return f"sampling {self.sampling!r:.80}; expected a Sampling with max_new_tokens of at least 1"
        if not isinstance(self.extras, set) or not self.extras <= set(declared):
            return f"extras {self.extras!r:.80}; expected a set with some of {', '.join(sorted(declared))}"
        return ""

    def room(self, context: int) -> int:
        """Return the number of tokens to generate: ``max_new_tokens``, or what a context of ``context`` tokens leaves after the prompt.

        Raises:
            MilesError: the prompt is empty or fills the context.
        """
        length = len(self.tokens)
        if not length:
            raise MilesError(f"request {self.key} has an empty prompt; give at least one token")
        if length >= context:
            raise MilesError(
                f"the prompt of request {self.key} has {length} tokens and leaves no room in the context of {context}; shorten or filter "
                "prompts, or raise the context length (--rollout-max-context-len, or the model's)"
            )
        return min(self.sampling.max_new_tokens, context - length)


def check_scored(sequences: Sequence[Sequence[int]], context: int) -> None:
    """Raise MilesError for a sequence to score that is empty or longer than ``context``."""
    for i, sequence in enumerate(sequences):
        if not 0 < len(sequence) <= context:
            raise MilesError(f"sequence {i} to score has {len(sequence)} tokens; 1 to {context} are possible")


@dataclass
class Response:
    """The result of a request. Lists of numbers become columns.

    Attributes:
        tokens: the new token ids, including a stop token.
        log_probs: [len(tokens)] at the sampling temperature (1 for greedy sampling), over the sampling support if
            ``sampling_support`` was requested, else over the full vocabulary.
        finish: ``stop`` (end or stop token, stop string), ``length`` or ``abort``.
        text: the decoded new text, truncated before a stop string.
        weight_versions: (index in ``tokens`` of the first token generated with a version, version), in ascending order.
        extras: field name -> rows; ``token-1`` fields have len(prompt) + len(tokens) - 1 rows, ``response`` fields len(tokens).
        metrics: the engine's measurements of this request; their means over the requests of a step become ``engine/NAME``.
    """

    tokens: ColumnField
    log_probs: ColumnField
    finish: Finish
    text: str = ""
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens, self.log_probs = as_column(self.tokens, TOKENS), as_column(self.log_probs, FLOATS)

    def find_fault(self, request: Request, vocabulary: int) -> str:
        """Describe the first value that is invalid as a response to ``request``; "" if there is none."""
        if not (type(self.tokens) is type(self.log_probs) is Column):
            self.__post_init__()  # an engine may have set a list
            for name in ("tokens", "log_probs"):
                if not isinstance(value := getattr(self, name), (list, Column)):
                    return f"{name} that are {describe(value)}; expected a list"
        if not isinstance(self.weight_versions, list):
            return f"weight_versions that are {describe(self.weight_versions)}; expected a list"
        count, most = len(self.tokens), request.sampling.max_new_tokens
        if count > most:
            return f"{count} tokens; the request allows max_new_tokens {most}"
        if fault := find_token_fault(self.tokens, vocabulary):
            return fault
        if len(self.log_probs) != count:
            return f"{count} tokens and {len(self.log_probs)} log_probs; expected one per token"
        if not isinstance(self.log_probs, Column):
            return f"log_probs that are {describe(self.log_probs)}; expected a list of numbers"
        log_probs = np.asarray(self.log_probs)
        if (
            count and not -inf < np.minimum.reduce(log_probs) <= np.maximum.reduce(log_probs) <= ROUNDING
        ):  # NaN included
            worst = next(p for p in self.log_probs if not (isfinite(p) and p <= ROUNDING))
            return f"the log-probability {worst}; expected finite values of at most 0"
        if self.finish not in FINISHES:
            return f"finish {self.finish!r}; expected stop, length or abort"
        if not count and self.finish != "abort":
            return f"no tokens and finish {self.finish!r}; a finished response has at least one"
        return self._find_version_fault(count)

    def _find_version_fault(self, count: int) -> str:
        pairs = self.weight_versions
        if len(pairs) == 1 and type(pairs[0]) is tuple and len(pairs[0]) == 2 and pairs[0][0] == 0:
            return ""
        if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
            return f"weight_versions {pairs!r:.80}; expected pairs (first token, version)"
        starts, versions = [start for start, _ in pairs], [version for _, version in pairs]
        if versions != sorted(versions) or len(set(starts)) < len(starts) or starts != sorted(starts):
            return f"weight_versions {pairs}; expected (first token, version) with both in ascending order"
        if pairs and (starts[0] != 0 or starts[-1] > count):
            return f"weight_versions {pairs} for {count} tokens; expected the first to begin at token 0"
        return ""


class Engine(ABC):
    """A rollout engine.

    ``capabilities`` are those of the manifest: ``routed_experts``, ``sampling_support``, ``score``, ``token_versions``, ``draft``,
    ``keyed_sampling``, ``rebuild``, ``shared_storage``, ``sleep``, ``span``, ``weight_checksums``, ``format:NAME`` for each number
    format that ``quantizer`` implements, and ``transport:NAME`` for each transport whose messages ``receive`` accepts.
    """

    capabilities: frozenset[str] = frozenset()
    #: dtype of keys and values in the engine's cache; "" is the model's dtype
    kv_cache_dtype: str = ""
    #: whether quantised layers multiply their codes on tensor cores, and ``emulated_products`` is available
    native_products: bool = False
    #: number of processes that receive each message passed to ``receive``
    receivers: int = 1
    #: pushes the learner's current weights to this engine again under the same version; set by a runtime that has learner and
    #: engine in one process. An engine whose model runs in a subprocess restarts a subprocess that died, awaits ``resend`` and
    #: repeats the requests in flight. If ``resend`` is None, it raises ``WorkerLost`` without a name instead.
    resend: Callable[[], Awaitable[None]] | None = None

    def hot_update(self, format: str) -> Literal["in_place", "via_disk", "restart"]:
        """Return how weights stored in ``format`` ("" for BF16) can be updated while the engine runs."""
        return "in_place"

    def quantizer(self, format: Format) -> Quantizer | None:
        """Return this backend's implementation of a number format, with the parity it declares.

        None for a format that the backend does not declare (capability ``format:NAME``), which the plan refuses.
        """
        return None

    def model_facts(self) -> Mapping[str, object]:
        """Return facts about the served model: ``model.num_experts`` and the others in ``same_model.COMPARED``.

        The engine reads them from the ``config.json`` or the modules it was started with; core compares them with the trainer's
        facts before the run. Empty if the backend cannot provide them. Called after ``start``.
        """
        return {}

    def emulated_products(self) -> AbstractContextManager[None]:
        """Context in which quantised layers compute with emulated products. Requires ``native_products``."""
        raise NotImplementedError(f"{type(self).__name__} cannot switch its products")

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        """Process one message of a transport in another process.

        A message is plain data in the transport's own protocol, for example the names and shapes of a bucket to be broadcast, memory
        handles, or a path. Messages arrive between ``pause`` and ``resume``, possibly before the previous call has returned. After a
        failure the engine is unusable until a complete new update. ``miles_workers.transport.Arrivals`` implements this method for buckets
        of encoded tensors (transport ``buckets``).

        Args:
            message: the message.
            version: version of the weights in transfer.
            last: whether this is the last message of the update; the engine serves ``version`` afterwards.

        Raises:
            SyncError: the weights did not arrive as sent.
        """
        raise NotImplementedError(f"{type(self).__name__} takes weights in its own process only")

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the current weights; -1 before the first ``update_weights``."""

    def span(self, machines: int, index: int, address: str) -> None:
        """Make this object the part of one engine on machine ``index`` of ``machines``. Requires the capability ``span``.

        The runtime calls it before ``start``, in one process per machine. The parts start concurrently. The part on machine 0 then
        receives all calls; the others only hold their share of the model until ``stop``.

        Args:
            machines: number of machines of the engine.
            index: index of this machine.
            address: HOST:PORT on machine 0 at which the parts find each other; the next 15 ports are free, too.
        """
        raise NotImplementedError(f"{type(self).__name__} runs on one machine")

    @abstractmethod
    async def start(self) -> None:
        """Start the engine."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the engine and release all its resources."""

    @abstractmethod
    def generate(self, request: Request) -> Awaitable[Response]:
        """Generate the continuation of one request; an async method, or one that returns a future. The engine batches concurrent calls."""

    @abstractmethod
    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        media: Sequence[tuple[Media, ...]] = (),
    ) -> list[np.ndarray]:
        """Return log p(token t | tokens before t) over the full vocabulary for t >= 1, [len - 1] float32 per sequence.

        Requires the capability ``score``. A temperature other than 1 also requires ``score_temperature``; without it, the method
        raises MilesError.

        Args:
            sequences: token ids of each sequence.
            temperature: divides the logits.
            media: what belongs to the placeholders of each sequence; () if none has any. Only engines with the capability ``media``
                receive any.
        """

    async def score_each(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        media: Sequence[tuple[Media, ...]] = (),
    ) -> Mapping[str, list[np.ndarray]]:
        """Run ``score`` on every worker of this engine: worker name -> scores. An engine without workers uses the name ""."""
        return {"": await self.score(sequences, temperature, media)}

    @abstractmethod
    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        """Load the encoded tensors of all weights as ``version``. There must be no in-flight requests, or they must be paused."""

    def reserve(self, name: str, stored: Mapping[str, Stored]) -> Mapping[str, torch.Tensor]:
        """Return memory of this engine into which the trainer in the same process encodes a weight of the current ``update_weights``, stored
        name -> tensor; {} if the engine copies the weight itself."""
        return {}

    async def share_weights(self, units: Iterable[Encoded], version: int) -> int:
        """Update weights like ``update_weights``, but share unencoded ``lasting`` tensors with the trainer instead of copying them.

        The engine keeps reading shared tensors from the trainer's memory, so a later update of the same tensors copies nothing.
        Requires the capability ``shared_storage``, an engine in the trainer's process, and no generation while the trainer steps.
        With this capability, an engine in another process shares the ``lasting`` tensors of messages passed to ``receive``.

        Returns:
            the number of bytes copied.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps weights of its own")

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the dtype in which the engine holds each tensor of an update, decoded: checkpoint name -> dtype.

        Requires the capability ``weight_checksums``. Called after ``start``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not know the layout of its weights")

    async def weight_checksums(self, names: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
        """Compute checksums of the weights that the engine computes with, after each sync: worker name ("" without workers) ->
        checkpoint name -> checksum (``miles_workers.transport.Checksums``).

        Each tensor is read from the memory that the forward pass reads, never from a message: parts of a fused parameter as slices of it,
        weights that are stored as codes decoded in the dtype of ``weight_dtypes``. Constant tensors that updates do not write are left
        out. Requires the capability ``weight_checksums``.

        Args:
            names: checkpoint names of tensors that the last update contained.
        """
        raise NotImplementedError(f"{type(self).__name__} does not know the layout of its weights")

    @abstractmethod
    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating; new requests wait for ``resume``. Core pauses the engine during every weight update.

        ``abort`` returns all requests with finish ``abort``. ``retract`` discards their cache and later resumes them from their
        tokens with the new weights. ``in_place`` keeps the cache. Pausing a paused engine has no effect; one ``resume`` ends it.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Continue after ``pause``."""

    @abstractmethod
    async def abort(self, keys: Collection[int] | None = None) -> None:
        """End in-flight requests, which return their partial results with finish ``abort``. A paused engine stays paused.

        Args:
            keys: keys of the requests to end, None for all. Keys that are not in flight are ignored.
        """

    async def sleep(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        """Release the device memory of ``parts``, so that a trainer on the same device can use it.

        There must be no in-flight requests, or they must be paused in a mode that keeps no cache. The engine computes no request
        until both parts are awake. Weights shared with the trainer (``share_weights``) are not released. Parts that already sleep
        are unaffected. Requires the capability ``sleep``; the default does nothing.
        """

    async def wake(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        """Allocate the memory of ``parts`` again.

        ``weights`` may be woken first, so that an update does not need memory for the cache at the same time. Weights that slept are
        undefined until the next update; weights that did not sleep remain valid.
        """

    async def rebuild(self, precision: str) -> None:
        """Change the precision of the served weights (the name of a number format, or ``bf16``).

        An ``update_weights`` must follow. There must be no in-flight requests, or they must be paused. Requires the capability
        ``rebuild``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot change its precision while running: leave --warmup-steps out"
        )
