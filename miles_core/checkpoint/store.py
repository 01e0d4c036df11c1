"""A store of named entries (tensors and JSON data) in one directory of a checkpoint.

The hooks ``on_save`` and ``on_load`` receive a store. A plugin's entry names start with the plugin's name; an entry is saved as
``<name>.safetensors`` and ``<name>.json``. Several ranks may share the directory: an entry is either written once, by rank 0,
or ``sharded``, with one part per rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.checkpoint.tensor_file import write_tensors
from miles_core.data.world import ALONE, World
from miles_core.errors import CheckpointError
from miles_core.text import load_strict_json

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
_SHARD = re.compile(r"\.(\d+)-of-(\d+)\.json$")


class Store:
    """Named entries (tensors and JSON data) in one directory of a checkpoint.

    Args:
        directory: directory of the files; created if missing.
        world: this process's rank among the processes that share the directory, and their number.
    """

    def __init__(self, directory: Path | str, world: World = ALONE) -> None:
        self.directory = Path(directory)
        self.world = world
        self._written: set[str] = set()

    def put(
        self, name: str, tensors: Mapping[str, Tensor] | None = None, data: Any = None, *, sharded: bool = False
    ) -> None:
        """Write one entry.

        Args:
            name: letters, digits, ``_ . -``, parts separated by ``/``; a plugin's entries start with the plugin's name.
            tensors: tensors of any shapes and dtypes; views and tensors with shared storage are copied.
            data: JSON data (a tuple is read back as a list).
            sharded: every rank writes its own part; otherwise only rank 0 writes.

        Raises:
            ValueError: the name is malformed or was already written.
            TypeError: ``data`` is not JSON data.
        """
        _check_name(name)
        if name in self._written:
            raise ValueError(f"the checkpoint already has an entry {name!r}; an entry is written once")
        self._written.add(name)
        if self.world.rank and not sharded:
            return
        try:
            # not json.dumps, during which other threads, such as the event loop, wait
            pieces = list(json.JSONEncoder().iterencode({"data": data, "tensors": bool(tensors)}))
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"checkpoint entry {name!r}: its data is not JSON ({error})") from error
        base = self._base(name, f".{self.world.rank}-of-{self.world.size}" if sharded else "")
        base.parent.mkdir(parents=True, exist_ok=True)
        if tensors:
            write_tensors(tensors, Path(f"{base}.safetensors"))
        # Written last: an entry exists only once its JSON file does.
        with Path(f"{base}.json").open("w", encoding="utf-8") as out:
            out.writelines(pieces)

    def get(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """Read an entry, or this rank's part of a sharded entry. Returns (tensors on the CPU, data).

        Raises:
            CheckpointError: the entry does not exist, or was saved by a different number of ranks. A plugin that can
                redistribute its state uses ``shards`` instead.
        """
        _check_name(name)
        whole = self._base(name)
        if Path(f"{whole}.json").is_file():
            return _read(whole)
        worlds = self._worlds(name)
        if not worlds:
            raise CheckpointError(
                f"{self.directory} has no entry {name!r}: the checkpoint was saved without it (entries: "
                f"{', '.join(self.names()) or 'none'})"
            )
        if worlds != {self.world.size}:
            saved = " and ".join(map(str, sorted(worlds)))
            raise CheckpointError(
                f"{self.directory}: entry {name!r} was saved by {saved} ranks and this run has {self.world.size}; "
                "resume with the saved number of ranks"
            )
        return _read(self._base(name, f".{self.world.rank}-of-{self.world.size}"))

    def shards(self, name: str) -> list[tuple[dict[str, Tensor], Any]]:
        """Read all parts of an entry in rank order, independent of the current number of ranks.

        Returns one part if the entry is not sharded.
        """
        _check_name(name)
        worlds = self._worlds(name)
        if not worlds:
            return [self.get(name)]
        world = max(worlds)
        return [_read(self._base(name, f".{rank}-of-{world}")) for rank in range(world)]

    def names(self) -> list[str]:
        """Return the names of all entries."""
        if not self.directory.is_dir():
            return []
        relative = (p.relative_to(self.directory).as_posix() for p in self.directory.rglob("*.json"))
        return sorted({_SHARD.sub(".json", name).removesuffix(".json") for name in relative})

    def __contains__(self, name: str) -> bool:
        _check_name(name)
        return Path(f"{self._base(name)}.json").is_file() or bool(self._worlds(name))

    def _base(self, name: str, suffix: str = "") -> Path:
        return self.directory / f"{name}{suffix}"

    def _worlds(self, name: str) -> set[int]:
        parent = self._base(name).parent
        if not parent.is_dir():
            return set()
        leaf = name.rpartition("/")[2]
        files = (f.name for f in parent.iterdir() if f.name.startswith(f"{leaf}."))
        return {int(m[2]) for f in files if (m := _SHARD.search(f)) and f[: m.start()] == leaf}


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or _SHARD.search(f"{name}.json"):
        raise ValueError(
            f"{name!r} cannot name a checkpoint entry: use letters, digits, '_', '-', '.', and '/' between parts"
        )


def _read(base: Path) -> tuple[dict[str, Tensor], Any]:
    try:
        # for each object it calls Python, where the event loop may take over; ``json.loads`` alone keeps it waiting
        entry = load_strict_json(Path(f"{base}.json").read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = {}
        if entry["tensors"]:
            from safetensors.torch import load_file

            tensors = load_file(f"{base}.safetensors")
        return tensors, entry["data"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint file {error.filename or base} is missing; use an earlier checkpoint"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"checkpoint entry {base} cannot be read ({error.strerror or error}); check its file system"
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        # json's ValueError, safetensors' own exception and a changed layout all mean that the entry is unusable.
        raise CheckpointError(f"checkpoint entry {base} is damaged ({error}); use an earlier checkpoint") from error
