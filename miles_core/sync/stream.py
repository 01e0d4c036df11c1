"""The stream of encoded weights of one rank. While trainer, codec and transport stay in the same memory, later syncs send the same objects
with new values, so neither side looks up each of thousands of tensors again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from miles_core.contracts.transport import Transport
from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.precision.codec import Codec
from miles_core.precision.format import Stored

#: Bytes of encoded weights that may stay allocated between syncs. What the encoder writes to memory of the engine does not count.
KEPT = 256 << 20


#: Name, storage and reserved tensors of a weight.
_Room = tuple[str, Mapping[str, Stored], Mapping[str, Tensor]]


@dataclass(frozen=True)
class _Sync:
    """The memory between which a sync moved weights.

    Attributes:
        memory: that of the trainer (``Trainer.find_memory``).
        codec, transport: what encoded and sent them.
        again: encodes and yields them again; None if this is unknown.
        refused: whether the stream cannot be repeated.
        room: arguments and result of a call of ``Transport.reserve``, which returns other tensors if the engine allocated its codes again.
    """

    memory: Hashable
    codec: Codec
    transport: Transport
    again: Callable[[], Iterator[Encoded]] | None = None
    refused: bool = False
    room: _Room | None = None

    def has_room(self) -> bool:
        """Whether the transport still reserves the same memory."""
        if self.room is None:
            return True
        name, stored, given = self.room
        now = self.transport.reserve(name, stored) or {}
        return all(now.get(part) is tensor for part, tensor in given.items())


class WeightStream:
    """Encodes the weights of each sync, in the same way as the last one if nothing moved.

    A plain stream is repeated from the second sync on. One with a number format is recorded during the second sync and repeated from the third
    on, because engines reserve memory for some codes only after they received them once.
    """

    def __init__(self) -> None:
        self._last: _Sync | None = None

    def clear(self) -> None:
        """Forget the last sync, and release its memory."""
        self._last = None

    def encode(
        self, units: Iterator[WeightUnit], codec: Codec, transport: Transport, memory: Hashable
    ) -> Iterator[Encoded]:
        """Yield the encoded tensors of one sync.

        Args:
            units: the trainer's weights; not read if they can be encoded without.
            memory: identifies the memory of ``units``; None if it is unknown or changes.
        """
        last, self._last = self._last, None
        if memory is None or (codec.format is not None and not transport.repeats):
            return codec.encode(units, transport.reserve)
        now = _Sync(memory, codec, transport)
        same = last is not None and last.memory == memory and last.codec is codec and last.transport is transport
        if last is not None and same and (last.again is not None or last.refused) and last.has_room():
            self._last = last
            return codec.encode(units, transport.reserve) if last.again is None else last.again()
        if codec.format is None or same:
            return self._record(units, now)
        return self._pass(codec.encode(units, transport.reserve), now)

    def _pass(self, encoded: Iterator[Encoded], now: _Sync) -> Iterator[Encoded]:
        yield from encoded
        self._last = now

    def _record(self, units: Iterator[WeightUnit], now: _Sync) -> Iterator[Encoded]:
        """Yield a stream, and keep it for later syncs if all its tensors are in memory that stays."""
        recording = _Recording(now.transport)
        for each in now.codec.encode(recording.read(units), recording.reserve):
            recording.add(each)
            yield each
        again = None if recording.stopped else now.codec.repeat(recording.units, recording.encoded)
        self._last = replace(now, again=again, refused=again is None, room=None if again is None else recording.room)


class _Recording:
    """What one sync encodes, until something in it turns out not to stay in memory."""

    def __init__(self, transport: Transport) -> None:
        self.units: list[WeightUnit] = []
        self.encoded: list[Encoded] = []
        self.stopped = False
        self.room: _Room | None = None
        self._transport = transport
        self._reserved: set[str] = set()
        self._kept = 0

    def read(self, units: Iterator[WeightUnit]) -> Iterator[WeightUnit]:
        """Yield the units unchanged."""
        for unit in units:
            if not unit.lasting:
                self._stop()
            if not self.stopped:
                self.units.append(unit)
            yield unit

    def reserve(self, name: str, stored: Mapping[str, Stored]) -> Mapping[str, Tensor] | None:
        """See ``Transport.reserve``."""
        given = self._transport.reserve(name, stored)
        if given:
            self._reserved.add(name)
            self.room = name, stored, given
        return given

    def add(self, each: Encoded) -> None:
        """Add an encoded tensor."""
        if each.format and each.name not in self._reserved:
            self._kept += each.nbytes
        if self._kept > KEPT:
            self._stop()
        if not self.stopped:
            self.encoded.append(each)

    def _stop(self) -> None:
        self.stopped, self.units, self.encoded = True, [], []
