"""Samples as rows of a file, and their encoding as compressed JSON lines. Images that the run read from files stay there; those of data URIs,
parquet files and tools are stored once each in ``RUN/rollouts/media``, under their SHA-256. Imported by the writer processes, so it must
not import torch."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from miles_core.data.column import concatenate
from miles_core.redact import MARK

if TYPE_CHECKING:
    from miles_core.data.sample import Sample

#: gzip level 1 takes a third of the time of the default level; the files are a fifth larger.
LEVEL = 1
#: Number of rows in a gzip member, to bound the memory of a writer.
_AT_ONCE = 256
_STRICT = json.JSONEncoder(default=str, allow_nan=False)


@dataclass(frozen=True)
class Row:
    """One sample.

    Attributes:
        plain: entries of any type; JSON has no form for some of them.
        columns: name -> one value per token, or None. ``tokens`` and ``loss_mask`` are integers, all others floats.
        response_length: number of last tokens that are the response, whose texts are the entry ``pieces``.
    """

    plain: Mapping[str, Any]
    columns: Mapping[str, np.ndarray | None] = field(default_factory=dict)
    response_length: int = 0


class Pieces(dict[int, str]):
    """Token id -> text. A token that is a part of a character is shown as one replacement character.

    Args:
        tokenizer: looks up texts; None in a process that receives them.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._known = np.zeros(0, bool)

    def add(self, tokens: np.ndarray) -> None:
        """Look up the texts of all ``tokens``, int32 [n] of at least 0."""
        for token in self.take_unknown(tokens):
            self[token] = self._describe(token)

    def take_unknown(self, tokens: np.ndarray) -> list[int]:
        """Return those of ``tokens``, int32 [n] of at least 0, that no earlier call contained, each once. The caller adds their texts."""
        if len(tokens) and (largest := int(tokens.max())) >= len(self._known):
            self._known = np.append(self._known, np.zeros(largest + 1 - len(self._known), bool))
        unknown = list(dict.fromkeys(tokens[~self._known[tokens]].tolist()))
        self._known[tokens] = True
        return unknown

    def _describe(self, token: int) -> str:
        name = self.tokenizer.convert_ids_to_tokens(token)
        text = str(self.tokenizer.decode([token]))
        # SentencePiece marks a leading space, but decoding a single token drops it
        return f" {text}" if str(name).startswith("\u2581") and not text.startswith(" ") else text


class RecordedTokens(Protocol):
    """The values that training recorded for a sample, float32 [response_length] or None; see ``TrainedTokens``."""

    @property
    def log_probs(self) -> np.ndarray | None: ...
    @property
    def advantages(self) -> np.ndarray | None: ...


#: A sample, the values that training recorded for it, and the name of its evaluation set.
Saved = tuple["Sample", RecordedTokens | None, str]


def response_of(row: Row) -> np.ndarray:
    """Return the tokens of the response, int32 [response_length]."""
    tokens = row.columns["tokens"]
    assert tokens is not None
    return tokens[len(tokens) - row.response_length :]


def divide(sizes: Sequence[int], parts: int) -> Iterator[slice]:
    """Divide rows with these numbers of tokens into at most ``parts`` consecutive parts of about equal size; none is empty."""
    ends = np.cumsum(sizes)
    starts = np.searchsorted(ends, np.arange(parts + 1) * (ends[-1] / parts), side="left")
    starts[-1] = len(sizes)
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if first < last:
            yield slice(first, last)


@dataclass(frozen=True)
class JoinedRows:
    """Rows of samples, without the fields of plugins. Their arrays of one column are one array, because many small ones take several times as
    long to make and to send.

    Attributes:
        plain: plain entries of each row, or their ``pack_plain``.
        columns: name -> (length of each row's array or None, all arrays one after the other).
        response_lengths: that of each row.
    """

    plain: Sequence[Mapping[str, Any]] | bytes
    columns: dict[str, tuple[list[int | None], np.ndarray]]
    response_lengths: list[int]

    @classmethod
    def of(cls, step: int, samples: Sequence[Saved]) -> JoinedRows:
        """Convert samples. step: the step that trained on them, or after which they were evaluated."""
        own, trained = [sample for sample, _, _ in samples], [recorded for _, recorded, _ in samples]
        columns = {
            "tokens": _join([sample.tokens for sample in own], np.int32),
            "loss_mask": _join([sample.loss_mask for sample in own], np.int8),
            "rollout_log_probs": _join([sample.rollout_log_probs for sample in own], np.float64),
            "train_log_probs": _join([each.log_probs if each else None for each in trained], np.float32),
            "advantages": _join([each.advantages if each else None for each in trained], np.float32),
        }
        plain = [_make_plain(step, sample, data_set) for sample, _, data_set in samples]
        return cls(plain, columns, [sample.response_length for sample in own])

    def __len__(self) -> int:
        return len(self.response_lengths)

    @property
    def size(self) -> int:
        """Number of tokens, plus 1 per row for its other entries."""
        return len(self.columns["tokens"][1]) + len(self)

    def pack(self) -> JoinedRows:
        """Return the rows as another process can receive them, whatever objects user functions have put into their plain entries."""
        return self if isinstance(self.plain, bytes) else replace(self, plain=pack_plain(self.plain))

    def split(self) -> list[Row]:
        """Return the rows."""
        plain = pickle.loads(self.plain) if isinstance(self.plain, bytes) else self.plain
        columns: list[dict[str, np.ndarray | None]] = [{} for _ in plain]
        for name, (lengths, values) in self.columns.items():
            at = 0
            for column, length in zip(columns, lengths, strict=True):
                column[name] = None if length is None else values[at : at + length]
                at += length or 0
        return [*map(Row, plain, columns, self.response_lengths)]


def _make_plain(step: int, sample: Sample, data_set: str) -> dict[str, Any]:
    plain = {
        "step": step,
        "set": data_set,
        "group": sample.group_index,
        "index": sample.index,
        "policy": sample.policy,
        "rollout": sample.index if sample.rollout_id is None else sample.rollout_id,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": str(sample.status),
        "removed": sample.remove_sample,
        "metadata": sample.metadata,
        "weight_versions": sample.weight_versions,
        "response_length": sample.response_length,
    }
    if sample.media:
        plain["media"] = describe_media(sample)
    return plain


def _join(values: Sequence[Any], dtype: type) -> tuple[list[int | None], np.ndarray]:
    lengths = [None if value is None else len(value) for value in values]
    return lengths, concatenate([value for value in values if value is not None], dtype)


class _PlainPickler(pickle.Pickler):
    """Refuses objects other than those of JSON and a few more built-in types: a process may lack the class of the others."""

    def reducer_override(self, value: Any) -> Any:
        raise pickle.PicklingError(f"{type(value)} is not plain")


def pack_plain(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Pickle plain entries of rows. If user functions have put other objects into one of them, each row's are JSON text, the entry ""."""
    packed = io.BytesIO()
    try:
        _PlainPickler(packed, 5).dump(entries)
    except (pickle.PicklingError, RecursionError):
        return pickle.dumps([{"": to_json(each)} for each in entries], 5)
    return packed.getvalue()


def pack(rows: Sequence[Row], pieces: Mapping[int, str], secrets: Sequence[str]) -> bytes:
    """Encode rows as gzip members; members of several calls can be concatenated.

    Args:
        rows: the samples.
        pieces: text of each token id.
        secrets: texts to remove.
    """
    members = []
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        text = "".join(map(_line, some, _plain_columns(some, pieces)))
        for secret in secrets:
            text = text.replace(secret, MARK)
        members.append(gzip.compress(text.encode(), LEVEL, mtime=0))
    return b"".join(members)


def _plain_columns(rows: Sequence[Row], pieces: Mapping[int, str]) -> list[dict[str, Any]]:
    """Convert the columns of rows to lists; all rows' columns of one name are rounded at once."""
    plain: list[dict[str, Any]] = [dict.fromkeys(row.columns) for row in rows]
    for name in dict.fromkeys(name for row in rows for name in row.columns):
        arrays = {n: array for n, row in enumerate(rows) if (array := row.columns.get(name)) is not None}
        if not arrays:
            continue
        values = _round(np.concatenate(list(arrays.values())))
        ends = list(accumulate(map(len, arrays.values())))
        for n, start, end in zip(arrays, [0, *ends], ends, strict=False):
            plain[n][name] = values[start:end]
            if name == "tokens":
                plain[n]["pieces"] = [pieces[token] for token in values[end - rows[n].response_length : end]]
    return plain


def _line(row: Row, columns: dict[str, Any]) -> str:
    head = row.plain[""] if "" in row.plain else to_json(row.plain)
    if not columns:
        return f"{head}\n"
    return f"{head[:-1]}, {json.dumps(columns)[1:]}\n"


def to_json(entries: Mapping[str, Any]) -> str:
    """Encode entries as strict JSON. User functions may have put arbitrary objects into them."""
    try:
        return _STRICT.encode(entries)
    except (ValueError, TypeError, RecursionError):  # non-finite number, non-string key, circular reference
        return json.dumps(_plain(entries), allow_nan=False)


def _plain(value: Any, depth: int = 0) -> Any:
    """Convert ``value`` to JSON types: keys become strings, non-finite numbers None, other objects their ``str``."""
    if isinstance(value, Mapping) and depth < 20:
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and depth < 20:
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)[:1000]


def _round(values: np.ndarray) -> list[Any]:
    """Convert integers to a list of int, and round others to six decimal places; non-finite values become None."""
    if values.dtype.kind in "iu":
        return list(values.tolist())
    array = np.round(values.astype(np.float64), 6)
    rounded: list[float | None] = array.tolist()
    for bad in np.flatnonzero(~np.isfinite(array)):
        rounded[bad] = None
    return rounded


def describe_media(sample: Sample) -> list[dict[str, str]]:
    """Return the entry ``media`` of a sample's row: kind and SHA-256 of each image, and the path of its file if it has one."""
    return [
        {
            "kind": media.kind,
            "digest": media.digest,
            **({"path": media.source} if isinstance(media.source, str) else {}),
        }
        for media in sample.media
    ]


def store_media(folder: Path, samples: Iterable[Sample]) -> None:
    """Store the images of samples that are not files, unless they are stored already.

    Raises:
        OSError: a file cannot be written.
    """
    contents = {m.digest: m.source for sample in samples for m in sample.media if isinstance(m.source, bytes)}
    for digest, content in contents.items():
        target = folder / digest
        if target.exists():
            os.utime(target)  # in use: it is not among the oldest
            continue
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{digest}.{os.getpid()}.part"
        part.write_bytes(content)
        part.replace(target)


def forget_media(folder: Path, limit: int) -> None:
    """Delete the images that were stored or used longest ago until the others have at most ``limit`` bytes."""
    if not folder.is_dir():
        return
    files = sorted(((e.stat().st_mtime_ns, e.stat().st_size, e.path) for e in os.scandir(folder)), reverse=True)
    total = 0
    for _, size, path in files:
        total += size
        if total > limit:
            Path(path).unlink(missing_ok=True)
