"""Samples whose tokens, texts and recorded fields stay where they were produced.

A rollout worker sends the attributes in ``SENT`` of each sample of a group, and a blob with all samples. The driver receives
``RemoteSample`` objects. They are sent to ranks as references, so the driver never reads the data of tokens. Access to any other attribute,
in a rank or in the driver (a filter that compares responses, a checkpoint of waiting groups), reads the group and makes the object a plain
``Sample``; from then on it is sent like any other. Fields that the driver sets (a teacher's log-probs, a critic's values) travel next to the
reference, so that setting them reads nothing.
"""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from miles_core.data.sample import Sample
from miles_core.errors import DataError, MilesError, first_line
from miles_runtime.blob import Blob, Stored

#: Attributes that travel with each sample. They contain nothing per token.
SENT = (
    *("response_length", "reward", "status", "weight_versions", "group_index", "index", "rollout_id", "remove_sample"),
    "policy",
)
#: All other attributes.
STORED = tuple(field.name for field in dataclasses.fields(Sample) if field.name not in SENT)

#: Number of attributes of a ``RemoteSample`` as ``refer`` makes it.
_ATTRIBUTES = len(SENT) + 3

#: Held while samples are read: several threads may read the same ones.
_READING = threading.RLock()


class StoredGroup:
    """The samples of a group in a blob, which are read once."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
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
        total: int = self.__dict__["_tokens"]
        return total - self.response_length

    def __eq__(self, other: object) -> bool:
        _read(self)
        if isinstance(other, RemoteSample):
            _read(other)
        return self == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        if len(self.__dict__) > _ATTRIBUTES:  # fields that the driver set
            return _restore, (self.__dict__,)
        return resolve, (reference(self),)


class _Attribute:
    """An attribute that is read from the group when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, sample: Any, owner: type) -> Any:
        if sample is None:
            return self
        _read(sample)
        return getattr(sample, self._name)

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
        own.update((name, getattr(whole, name)) for name in STORED)
        if added := own.pop("_added", None):
            own["fields"] = own["fields"] | added
        for name in ("_group", "_position", "_tokens"):
            del own[name]
        object.__setattr__(sample, "__class__", Sample)


#: What is sent of a sample: its number of tokens and the values of ``SENT``.
Head = tuple[Any, ...]


def heads(samples: Sequence[Sample]) -> list[Head]:
    """Return what is sent of each sample."""
    return [(len(sample.tokens), *(getattr(sample, name) for name in SENT)) for sample in samples]


def refer(sent: Sequence[Head], stored: Stored) -> list[Sample]:
    """Return references to the samples of a group, whose ``heads`` were sent."""
    group = StoredGroup(stored)
    return [resolve((group, position, head)) for position, head in enumerate(sent)]


#: A ``RemoteSample`` as plain data: its group, its position there, and its ``Head``.
Reference = tuple[StoredGroup, int, Head]


def reference(sample: RemoteSample) -> Reference:
    """Return a reference to a sample, with its current values of ``SENT`` and without fields that the driver set. It is smaller than the
    object and faster to serialize."""
    own = sample.__dict__
    return own["_group"], own["_position"], (own["_tokens"], *(own[name] for name in SENT))


def resolve(found: Reference) -> Sample:
    """Inverse of ``reference``."""
    group, position, head = found
    return _restore(
        {"_group": group, "_position": position, "_tokens": head[0], **dict(zip(SENT, head[1:], strict=True))}
    )


def pack_samples(samples: Sequence[Sample]) -> Blob:
    """Serialize samples for another process.

    Raises:
        DataError: a value cannot be serialized; names the sample and the entry.
    """
    try:
        return Blob.dump(list(samples))
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
