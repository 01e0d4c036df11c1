"""The engine's weights: which version they are, whether they are complete, and the ways in which new ones come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from miles_core.data.unit import Encoded
from miles_core.errors import SyncError
from miles_core.precision.codec import Codec
from miles_core.precision.product import Products
from miles_core.sync.inbox import Inbox
from miles_embedded.model.load_units import Update
from miles_embedded.model.released import Released
from miles_embedded.quantized.activation import RoundedInputs


@dataclass
class _Arriving:
    """An update that comes in buckets: how many of each rank came, and whose last one did. It goes into the model bucket by bucket,
    or is ``held`` beside it."""

    version: int
    update: Update | None
    held: list[Encoded] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


class Weights:
    """The weights of one model. They lie here as plain numbers, beside the codes of native products: a precision is how they
    are read, and how products read their inputs.

    Args:
        model: the engine's module.
        codec: reads encoded weights.
        products: how quantised layers multiply.
        codec_of: precision -> codec, where it may change.
        changed: called when the weights are other ones, or will be.

    Attributes:
        codec: reads encoded weights.
        inputs: how products read their inputs.
        version: of the last complete update; -1 before the first.
        complete: whether the model holds one version and nothing else.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: Codec,
        products: Products,
        codec_of: Callable[[str], Codec] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.products = model, products
        self.version = -1
        self.complete = True
        self._codec_of, self._changed = codec_of, changed
        self._read_with(codec)
        self._shared: set[str] = set()
        self._inbox = Inbox()
        self._arriving: _Arriving | None = None
        self._staged: _Arriving | None = None
        self._released = Released(keep=False)

    def sleep(self) -> None:
        """Give the memory of the model's parameters back, all but that of the trainer; an update must come before they are read."""
        self.complete, self._arriving, self._staged = False, None, None
        self.inputs.drop(list(self.inputs.layers))
        self._released.release(p for name, p in self.model.named_parameters() if name not in self._shared)

    def wake(self) -> None:
        """Take the memory again."""
        self._released.restore()

    def rebuild(self, precision: str) -> None:
        """Read the next update, which has to come, in another precision."""
        if self._codec_of is None:
            raise RuntimeError("this engine was built without a way to make other codecs (Settings.codec_of)")
        self.inputs.remove()
        self._read_with(self._codec_of(precision))
        self.complete = False
        self._changed()

    def update(self, units: Iterable[Encoded], version: int, share: bool = False) -> int:
        """Take a whole update at once; ``share`` as for ``Update``. Returns how many bytes were copied."""
        if self._released:
            raise RuntimeError("these weights sleep: wake them before they are updated")
        self.complete, self._arriving, self._staged = False, None, None
        update = Update(self.model, self.codec.decode, self._shared, share)
        update.take(self.inputs.taking(units))
        copied = update.finish()
        self._serve(version)
        return copied

    def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        """Take one bucket. ``sender`` of a message is (rank, ranks): an update is complete with the last bucket of every rank;
        ``number`` counts a rank's buckets, and 0 begins its part anew. Buckets that are ``staged`` are held beside the model, which
        goes on with what it has, until a message says ``switch``.

        Raises:
            SyncError: a bucket is not what was sent, or did not come.
        """
        if self._released:
            raise RuntimeError("these weights sleep: wake them before they are updated")
        staged = bool(message.get("staged"))
        self.complete = self.complete and staged
        if message.get("switch"):
            self._switch(version)
            return
        arriving, (rank, ranks), number = (
            self._staged if staged else self._arriving,
            message["sender"],
            message["number"],
        )
        if arriving is None or arriving.version != version or (number == 0 and rank in arriving.counts):
            arriving = _Arriving(version, None if staged else Update(self.model, self.codec.decode, self._shared))
        self._arriving = self._staged = None  # until this one is in
        inbox, self._inbox = self._inbox, Inbox()
        expected = arriving.counts.get(rank, 0)
        if number != expected:
            raise SyncError(
                f"bucket {number} of version {version} came to an engine that has {expected} of them: a message was lost, or the "
                "engine was started anew"
            )
        self._admit(arriving, inbox.open(message))
        arriving.counts[rank], self._inbox = number + 1, inbox
        if last:
            arriving.done.add(rank)
        whole = len(arriving.done) == ranks
        if whole:
            inbox.finish()
        if staged:
            self._staged = arriving
        elif not whole:
            self._arriving = arriving
        elif arriving.update is not None:
            arriving.update.finish()
            self._serve(version)

    def _admit(self, arriving: _Arriving, units: list[Encoded]) -> None:
        """Take what is in a bucket out of it: the sender writes over it as soon as ``receive`` returns."""
        if arriving.update is None:
            home = next(self.model.parameters()).device
            arriving.held += [
                Encoded(u.name, {n: t.to(home, copy=True) for n, t in u.parts.items()}, u.format) for u in units
            ]
        else:
            arriving.update.take(self.inputs.taking(units))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _switch(self, version: int) -> None:
        """Put the staged version in force; every rank says so."""
        staged, self._staged = self._staged, None
        if staged is not None and staged.version == version:
            self.update(staged.held, version)
        elif self.version == version:
            self.complete = True
        else:
            raise SyncError(f"version {version} was not staged in this engine: it was started anew")

    def _serve(self, version: int) -> None:
        self.version, self.complete = version, True
        self._changed()

    def _read_with(self, codec: Codec) -> None:
        self.codec = codec
        self.inputs = RoundedInputs(self.model, codec, self.products.of(codec.format, self.model))
