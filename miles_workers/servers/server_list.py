"""The addresses of running servers: a list, or a file with one address per line that may change during a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from miles_core.errors import ConfigError
from miles_core.redact import redact


def find_file(items: Sequence[str]) -> Path | None:
    """Return the file that the value names with ``@FILE`` or a path; None if it lists addresses."""
    if len(items) != 1 or "://" in items[0]:
        return None
    item = items[0]
    if item.startswith("@"):
        return Path(item[1:])
    return Path(item) if "/" in item or Path(item).is_file() else None


class ServerList:
    """The value of an option such as ``--sglang-url``.

    Args:
        flag: the option.
        items: addresses, or one ``@FILE`` or path.
    """

    def __init__(self, flag: str, items: Sequence[str]) -> None:
        self.flag, self._items, self.file = flag, tuple(items), find_file(items)
        self._seen: tuple[int, ...] = ()

    def __str__(self) -> str:
        return str(self.file) if self.file else ",".join(map(redact, self._items))

    def read(self) -> tuple[str, ...]:
        """Return the addresses.

        Raises:
            ConfigError: the file cannot be read or has no address, an address is malformed, or occurs twice.
        """
        origin = f"{self.flag} {self}"
        lines = self._items if self.file is None else self._read_lines(self.file)
        if not lines:
            raise ConfigError(
                f"{origin}: the file lists no server; write one address per line, such as http://host:30000"
            )
        for line in lines:
            if not is_address(line):
                raise ConfigError(
                    f"{origin}: {redact(line)!r} is not the address of a server; write http:// or https://, the host and the port, such as "
                    "http://host:30000"
                )
        urls = [line.rstrip("/") for line in lines]
        for url in urls:
            if urls.count(url) > 1:
                raise ConfigError(f"{origin}: {redact(url)} is listed twice; list every server once")
        return tuple(urls)

    def has_changed(self) -> bool:
        """Whether the file is another one than at the last call or ``read``."""
        return self.file is not None and self._stamp(self.file) != self._seen

    def _read_lines(self, file: Path) -> list[str]:
        self._seen = self._stamp(file)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.flag} {self}: the file with the servers' addresses cannot be read ({error}); correct the path, or list addresses"
            ) from error
        return [line for each in text.splitlines() if (line := each.partition("#")[0].strip())]

    @staticmethod
    def _stamp(file: Path) -> tuple[int, ...]:
        try:
            found = file.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino


def is_address(url: str) -> bool:
    """Whether ``url`` is the address of an HTTP server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False
