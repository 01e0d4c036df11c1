"""Names of saved weights, as clients see them, and their directories.

``tinker://MODEL/weights/NAME`` is a state with optimizer, ``tinker://MODEL/sampler_weights/NAME`` one for sampling. They are stored under
``SAVE/weights/MODEL`` and ``SAVE/sampler_weights/MODEL``, where later servers with the same ``--save`` find them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from miles_core.plugin import ConfigError

KINDS = ("weights", "sampler_weights")
#: Unnamed weights of samplers that are kept per model; a client makes new ones at each step.
KEPT = 8
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_PATH = re.compile(r"tinker://([0-9a-f]{16}):train:(\d{1,9})/(weights|sampler_weights)/([^/]+)")


class SavedWeights:
    """The saved weights of a server.

    Args:
        root: the server's directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._unnamed: dict[str, list[Path]] = {}

    def new(self, model: str, kind: str, name: str) -> tuple[str, Path]:
        """Return the path and the directory of weights to save.

        Raises:
            ConfigError: the name cannot be used.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"the name {name!r:.120} cannot be used; use up to 100 letters, digits, '.', '_' and '-'")
        return f"tinker://{model}/{kind}/{name}", self._directory(model, kind, name)

    def find(self, path: str) -> Path:
        """Return the directory of saved weights.

        Raises:
            ConfigError: there are none.
        """
        match = _PATH.fullmatch(path)
        directory = self._directory(f"{match[1]}:train:{match[2]}", match[3], match[4]) if match else None
        if directory is None or not directory.is_dir() or not _NAME.fullmatch(directory.name):
            raise ConfigError(f"there are no saved weights {path!r:.200} on this server")
        return directory

    def unnamed(self, model: str, number: int) -> Path:
        """Return the directory of weights for one sampler, and delete the oldest ones of this model."""
        made = self._directory(model, "sampler_weights", f".{number}")
        kept = self._unnamed.setdefault(model, [])
        kept.append(made)
        while len(kept) > KEPT:
            shutil.rmtree(kept.pop(0), ignore_errors=True)
        return made

    def forget(self, model: str) -> None:
        """Delete the unnamed weights of a model."""
        for directory in self._unnamed.pop(model, ()):
            shutil.rmtree(directory, ignore_errors=True)

    def _directory(self, model: str, kind: str, name: str) -> Path:
        return self.root / kind / model.replace(":", "-") / name


def delete_unnamed(root: Path) -> None:
    """Delete the unnamed weights that an earlier server left in its directory."""
    for directory in root.glob("sampler_weights/*/.*"):
        shutil.rmtree(directory, ignore_errors=True)
