"""Images of saved samples. Those that the run read from files stay there; those of data URIs, parquet files and tools are stored once each
in ``RUN/rollouts/media``, under their SHA-256. Imported by the writer processes, so it must not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.data.sample import Sample


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
