"""Samples whose tokens, texts and recorded fields stay where they were produced.

A rollout worker sends the attributes in ``SENT`` of the samples of a group (``heads``), and a reference with all samples. The driver receives
``RemoteSample`` objects. They are sent to ranks as references, so the driver never reads the data of tokens. References to samples of a
group travel together (``sample_list``), with the attributes in ``SENT`` that the driver has changed. Access to any other attribute, in a rank
or in the driver (a filter that compares responses, a checkpoint of waiting groups), reads the group and makes the object a plain
``Sample``; from then on it is sent like any other. Fields that the driver sets (a teacher's log-probs, a critic's values) travel next to the
reference, so that setting them reads nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError, MilesError, first_line
from miles_workers.object_ref import ObjectRef, Stored
from miles_workers.packed_column import Packed, pack_column, unpack_column

#: Attributes that travel with each sample. They contain nothing per token.
SENT = (
    *("response_length", "reward", "status", "weight_versions", "group_index", "index", "rollout_id", "remove_sample"),
    "policy",
)
#: All other attributes.
STORED = tuple(field.name for field in dataclasses.fields(Sample) if field.name not in SENT)

#: Held while samples are read: several threads may read the same ones.
_READING = threading.RLock()


class StoredGroup:
    """The samples of a group in a reference, which are read once.

    Attributes:
        stored: the stored object.
        sent: in the driver, the values of ``SENT`` that the worker sent, by name; other processes read them from the object.
    """

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.sent: dict[str, list[Any]] = {}
        self._samples: list[Sample] | None = None

    def sample(self, position: int) -> Sample:
        """Return the sample at ``position``. Call it with ``_READING`` held. Raises what ``read_samples`` raises."""
        if self._samples is None:
            self._samples = read_samples(self.stored)
        return self._samples[position]

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredGroup, (self.stored,)


class RemoteSample(Sample):
    """A sample of a ``StoredGroup``. Construct it with ``refer``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that copy and numpy look for
            raise AttributeError(name)
        _read(self)
        return getattr(self, name)

    @property
    def prompt_length(self) -> int:
        if "_tokens" not in self.__dict__:
            _read(self)
            return len(self.tokens) - self.response_length
        total: int = self.__dict__["_tokens"]
        return total - self.response_length

    def __eq__(self, other: object) -> bool:
        _read(self)
        if isinstance(other, RemoteSample):
            _read(other)
        return self == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _restore, (self.__dict__,)


class _Sent:
    """An attribute in ``SENT`` that the driver has not changed: outside the driver it is read from the group."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, sample: Any, owner: type) -> Any:
        if sample is None:
            return self
        _read(sample)
        return getattr(sample, self._name)


class _Attribute(_Sent):
    """An attribute that only the group has; setting it makes the object a plain sample."""

    def __set__(self, sample: Any, value: Any) -> None:
        _read(sample)
        setattr(sample, self._name, value)


class RemoteFields(MutableMapping[str, Any]):
    """``Sample.fields`` of a ``RemoteSample``. Setting entries, and reading those that were set, does not read the group."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(self.sample, RemoteSample):
            self.sample.__dict__.setdefault("_added", {})[name] = value
        else:  # it was read meanwhile
            self.sample.fields[name] = value

    def __getitem__(self, name: str) -> Any:
        added = self.sample.__dict__.get("_added", {})
        return added[name] if name in added else self._read()[name]

    def __delitem__(self, name: str) -> None:
        del self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return self._read() | dict(other)

    def __ior__(self, other: Mapping[str, Any]) -> RemoteFields:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(self._read())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._read(),)

    def _read(self) -> dict[str, Any]:
        _read(self.sample)
        return self.sample.fields


class _Fields(_Attribute):
    """The attribute ``fields``."""

    def __get__(self, sample: Any, owner: type) -> Any:
        return self if sample is None else RemoteFields(sample)

    def __set__(self, sample: Any, value: Any) -> None:
        if not (
            isinstance(value, RemoteFields) and value.sample is sample
        ):  # ``sample.fields |= more`` sets what it got
            super().__set__(sample, value)


for _name in SENT:
    setattr(RemoteSample, _name, _Sent(_name))
for _name in STORED:
    setattr(RemoteSample, _name, (_Fields if _name == "fields" else _Attribute)(_name))


def _restore(own: dict[str, Any]) -> RemoteSample:
    sample = RemoteSample.__new__(RemoteSample)
    sample.__dict__.update(own)
    return sample


def _read(sample: Sample) -> None:
    """Make a ``RemoteSample`` a plain one."""
    with _READING:
        if not isinstance(sample, RemoteSample):  # another thread did
            return
        own = sample.__dict__
        whole = own["_group"].sample(own["_position"])
        own.update((name, getattr(whole, name)) for name in (*SENT, *STORED) if name not in own)
        if added := own.pop("_added", None):
            own["fields"] = own["fields"] | added
        for name in ("_group", "_position", "_tokens"):
            own.pop(name, None)
        object.__setattr__(sample, "__class__", Sample)


#: What is sent of the samples of a group: their number, and their numbers of tokens and values of ``SENT`` in packed form.
Heads = tuple[int, list[Packed]]

_STATUSES = [*Status]


def heads(samples: Sequence[Sample]) -> Heads:
    """Return what is sent of the samples of a group."""
    if not samples:
        return 0, []
    columns = [[len(sample.tokens) for sample in samples], *([getattr(s, name) for s in samples] for name in SENT)]
    columns[_STATUS] = [_STATUSES.index(status) for status in columns[_STATUS]]
    packed = [pack_column(column) for column in columns]
    if columns[_ROLLOUT] == columns[_INDEX]:
        packed[_ROLLOUT] = packed[_INDEX]  # pickle refers to it
    return len(samples), packed


_STATUS, _INDEX, _ROLLOUT = (1 + SENT.index(name) for name in ("status", "index", "rollout_id"))


def refer(sent: Heads, stored: Stored) -> list[Sample]:
    """Return references to the samples of a group, whose ``heads`` were sent."""
    count, packed = sent
    if not count:
        return []
    group = StoredGroup(stored)
    tokens, *columns = [unpack_column(column, count) for column in packed]
    columns[_STATUS - 1] = [_STATUSES[number] for number in columns[_STATUS - 1]]
    group.sent = dict(zip(SENT, columns, strict=True))
    for name, column in zip(SENT, packed[1:], strict=True):
        if isinstance(group.sent[name][0], (list, dict)):  # the driver may change the lists and dicts of the samples
            if type(column) is list:
                group.sent[name] = copy.deepcopy(column)
            else:
                group.sent[name] = [column[0]] * count if len(column) == 1 else unpack_column(column, count)
    rows = zip(tokens, *columns, strict=True)
    return [_restore(_state(group, position, size, row)) for position, (size, *row) in enumerate(rows)]


def _state(group: StoredGroup, position: int, tokens: int, values: Sequence[Any]) -> dict[str, Any]:
    return {"_group": group, "_position": position, "_tokens": tokens, **dict(zip(SENT, values, strict=True))}


def is_reference(sample: Sample) -> bool:
    """Whether ``pack_run`` can refer to the sample, without fields that the driver set."""
    return type(sample) is RemoteSample and "_tokens" in sample.__dict__


def is_complete_reference(sample: Sample) -> bool:
    """Whether ``pack_run`` can refer to the sample and the driver has set no fields."""
    return is_reference(sample) and "_added" not in sample.__dict__


#: Consecutive samples of one group as plain data: their reference, the position of the first one, their number, and their packed values of ``SENT``
#: that the driver has changed, by name.
Run = tuple[Stored, int, int, Mapping[str, Packed] | None]


def split_runs(
    samples: Sequence[Sample], limit: int, refers: Callable[[Sample], bool] = is_complete_reference
) -> Iterator[Sequence[Sample]]:
    """Split samples into runs of at most ``limit`` consecutive samples of one group for ``pack_run``; a sample that ``refers`` rejects is
    alone."""
    start, group, position = 0, None, 0
    for number, sample in enumerate(samples):
        own = sample.__dict__
        found = own["_group"] if refers(sample) else None
        if number and (found is None or found is not group or own["_position"] != position or number - start >= limit):
            yield samples[start:number]
            start = number
        group, position = found, own["_position"] + 1 if found is not None else 0
    if samples:
        yield samples[start:]


def pack_run(run: Sequence[Sample]) -> Run:
    """Pack a run of ``split_runs`` for another process."""
    owns = [sample.__dict__ for sample in run]
    group: StoredGroup = owns[0]["_group"]
    first: int = owns[0]["_position"]
    changed: dict[str, Packed] = {}
    for name in SENT:
        values = [own[name] for own in owns]
        sent = group.sent.get(name, ())[first : first + len(run)]
        if len(sent) < len(run) or not (all(map(is_, values, sent)) or all(map(_is_same, values, sent))):
            changed[name] = pack_column(values)
    return group.stored, first, len(run), changed or None


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def unpack_run(run: Run, groups: dict[int, StoredGroup]) -> list[Sample]:
    """Inverse of ``pack_run``. groups: the groups of one message by the identity of their object reference; a new one is added."""
    stored, first, count, changed = run
    group = groups.setdefault(id(stored), StoredGroup(stored))
    columns = {name: unpack_column(column, count) for name, column in (changed or {}).items()}
    return [
        _restore({"_group": group, "_position": first + i, **{name: values[i] for name, values in columns.items()}})
        for i in range(count)
    ]


def pack_samples(samples: Sequence[Sample]) -> ObjectRef:
    """Serialize samples for another process.

    Raises:
        DataError: a value cannot be serialized; names the sample and the entry.
    """
    try:
        return ObjectRef.dump(list(samples))
    except Exception as error:
        for sample in samples:
            for place, value in _entries(sample):
                try:
                    pickle.dumps(value, 5)
                except Exception as cause:
                    raise DataError(
                        f"sample {sample.index}: {place} is a {type(value).__name__}, which cannot be sent between the driver and a "
                        f"rollout worker ({first_line(cause)}); keep plain data there, or leave --rollout-workers out"
                    ) from error
        raise


def _entries(sample: Sample) -> list[tuple[str, Any]]:
    """Return (name, value) of every entry of a sample."""
    named = [(field.name, getattr(sample, field.name)) for field in dataclasses.fields(sample)]
    inner = [(f"metadata[{key!r}]", value) for key, value in sample.metadata.items()]
    return inner + [(f"its {name}", value) for name, value in named]


def read_samples(stored: Stored) -> list[Sample]:
    """Inverse of ``pack_samples``.

    Raises:
        DataError: the samples contain an object of a class that this process cannot import.
    """
    try:
        samples: list[Sample] = stored.read()
    except MilesError:
        raise
    except Exception as error:
        raise DataError(
            f"samples cannot be read in the other process ({type(error).__name__}: {first_line(error)}): a prompt source, a rollout "
            "function or a reward stored an object of a class of its own in them; keep plain data there, or leave --rollout-workers out"
        ) from error
    return samples
