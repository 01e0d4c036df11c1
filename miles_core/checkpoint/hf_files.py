"""Read the weight files of a Hugging Face checkpoint tensor by tensor.

A safetensors file consists of eight bytes with the length of the header, the header (JSON: name -> dtype, shape, byte range)
and the bytes of the tensors. Opening a checkpoint reads only the headers and checks them against the index and the file
sizes, so that a missing or truncated file is reported first. Each read copies a tensor, or one row, into newly allocated
memory. Files are not memory-mapped, so only tensors that the caller keeps use memory.

Only reading tensors imports torch: a plan reads headers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import CheckpointError
from miles_core.text import load_strict_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_HEADER_LIMIT = 100 << 20  # bytes, the limit of the safetensors format

#: safetensors dtype name -> name of the torch dtype, and bytes per element.
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_CODES = {name: code for code, (name, _) in DTYPES.items()}


def code_of(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype. Raises KeyError if the format has none."""
    return _CODES[str(dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class Entry:
    """One tensor of a weight file. ``code`` is its dtype as safetensors names it, ``offset`` the position of its first byte in the file."""

    name: str
    code: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        import torch

        return getattr(torch, DTYPES[self.code][0])  # type: ignore[no-any-return]


class CheckpointFiles:
    """The weight files of a Hugging Face checkpoint directory.

    Args:
        directory: the checkpoint directory.
        flag: the flag that named it, for error messages.

    Attributes:
        directory: the checkpoint directory.
        config: the contents of ``config.json``.
        entries: tensor name -> entry, in file order.
        files: the weight files.

    Raises:
        CheckpointError: the directory, ``config.json`` or the safetensors weights are missing; the index does not match the
            files; a file is missing, truncated or damaged; or torch does not have a stored dtype.
    """

    def __init__(self, directory: Path | str, flag: str = "--model-dir") -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"{flag} {directory}: no such directory; give a local Hugging Face checkpoint")
        self.config = read_json(self.directory / CONFIG)
        listed = _read_index(self.directory)
        self.files = sorted(
            {self.directory / file for file in listed.values()} if listed else _find_weight_files(self.directory)
        )
        self.entries: dict[str, Entry] = {}
        for file in self.files:
            for entry in read_header(file):
                self._add(entry, listed)
        missing = [name for name in listed if name not in self.entries]
        if missing:
            raise CheckpointError(
                f"{self.directory / INDEX} lists {missing[0]} in {listed[missing[0]]}, which does not hold it "
                f"({len(missing)} such tensors); copy the checkpoint again"
            )

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read a tensor, or only index ``row`` of its first dimension, into new memory."""
        entry = self.entries[name]
        if row is None:
            return self.read_bytes(name).view(entry.dtype).reshape(entry.shape)
        size = entry.nbytes // entry.shape[0]
        return self.read_bytes(name, row * size, (row + 1) * size).view(entry.dtype).reshape(entry.shape[1:])

    def read_bytes(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read bytes ``start`` to ``stop`` (exclusive) of a tensor; returns uint8 [stop - start]."""
        import torch

        entry = self.entries[name]
        buffer = torch.empty((entry.nbytes if stop is None else stop) - start, dtype=torch.uint8)
        view = memoryview(buffer.numpy().data)
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.offset + start)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{entry.file} ended inside {name}; copy it again")
                done += count
        return buffer

    def _add(self, entry: Entry, listed: dict[str, str]) -> None:
        home = listed.get(entry.name)
        if listed and home is None:
            raise CheckpointError(
                f"{entry.file} holds {entry.name}, which {INDEX} does not list: index and files are of different "
                "checkpoints; copy both again"
            )
        if home is not None and home != entry.file.name:
            return  # a second copy in another file; the index selects which copy to read
        if entry.name in self.entries:
            raise CheckpointError(
                f"{entry.name} is in both {self.entries[entry.name].file.name} and {entry.file.name} of "
                f"{self.directory}, and there is no {INDEX} to say which one counts"
            )
        self.entries[entry.name] = entry


def read_header(file: Path) -> list[Entry]:
    """Return the tensors of a safetensors file, ordered by their offsets.

    Raises:
        CheckpointError: the file is truncated or damaged, or has a dtype that torch does not have.
    """
    with file.open("rb") as source:
        start = source.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 0 < length <= _HEADER_LIMIT:
            raise CheckpointError(f"{file} is not a safetensors file, or it is truncated; copy it again")
        try:
            header = load_strict_json(source.read(length))
            header.pop("__metadata__", None)
            entries = [_parse_entry(file, name, record, 8 + length) for name, record in header.items()]
            entries.sort(key=lambda e: (e.offset, e.nbytes))
            for before, after in pairwise(entries):
                if after.offset < before.offset + before.nbytes:
                    raise ValueError(f"{before.name} and {after.name} share bytes")
                if after.offset > before.offset + before.nbytes:
                    raise ValueError(f"the bytes between {before.name} and {after.name} belong to no tensor")
            if entries and entries[0].offset != 8 + length:
                raise ValueError(f"the bytes before {entries[0].name} belong to no tensor")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{file}: its header is damaged or truncated ({type(error).__name__}: {error}); copy it again"
            ) from error
    needed = max((e.offset + e.nbytes for e in entries), default=8 + length)
    size = file.stat().st_size
    if size < needed:
        raise CheckpointError(f"{file} is truncated: {size:,} of {needed:,} bytes; copy it again")
    if size > needed:
        raise CheckpointError(f"{file} has {size:,} bytes, and its tensors end after {needed:,}; copy it again")
    return entries


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises CheckpointError if the file is missing or holds something else."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no {path.name}, so it is not a Hugging Face checkpoint")
    try:
        content = load_strict_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not an object; copy it again")
    return content


def _parse_entry(file: Path, name: str, record: dict[str, Any], base: int) -> Entry:
    code, shape, (first, last) = record["dtype"], tuple(record["shape"]), record["data_offsets"]
    if code not in DTYPES:
        raise CheckpointError(f"{file}: {name} has the dtype {code}, which torch does not have")
    if any(type(n) is not int or n < 0 for n in (*shape, first, last)):
        raise ValueError(f"{name} has the shape {list(shape)} and the bytes {first} to {last}")
    if math.prod(shape) * DTYPES[code][1] != last - first:
        raise ValueError(f"{name} {list(shape)} {code} cannot be {last - first} bytes")
    return Entry(name, code, shape, file, base + first, last - first)


def _read_index(directory: Path) -> dict[str, str]:
    """Read the index: tensor name -> file name. Returns an empty mapping if there is no index."""
    path = directory / INDEX
    if not path.is_file():
        return {}
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path} has no weight_map; copy it again")
    strange = next((f for f in listed.values() if not isinstance(f, str) or Path(f).name != f), None)
    if strange is not None:
        raise CheckpointError(f"{path} lists {strange!r}, which is not the name of a file in that directory")
    missing = [f for f in sorted(set(listed.values())) if not (directory / f).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory}: {missing[0]} is missing ({len(missing)} of the {len(set(listed.values()))} weight files "
            f"that {INDEX} lists); copy it again"
        )
    return listed


def _find_weight_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no *.safetensors weights; other formats are not read")
    return files
