"""The samples of a run for the page: lists of a step's samples, and single ones with their tokens.

Nothing is held but the lists of a few steps: single samples are read from their file by their place in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import MilesError
from miles_tools.report.conversation import calls_of, turns_of
from miles_tools.samples.files import DIRECTORY, FILE, KINDS, MEDIA
from miles_tools.samples.index import DAMAGE, Place, read_at, read_lines

#: Steps whose lists are held.
_HELD = 16
#: Characters of a response in a list.
_PREVIEW = 120
#: Limits of a single sample: its tokens, and the characters of each text.
TOKENS, CHARACTERS = 100_000, 400_000
#: Bytes of the largest image that is shown.
_LARGEST = 64 << 20
#: First bytes of the images that a page shows, and their types. SVG is not one of them: it may contain scripts.
_IMAGES = {
    b"\x89PNG\r\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}


@dataclass(frozen=True)
class _Step:
    """The samples of a step: what the list shows of each, and its place in the file with this signature."""

    signature: tuple[int, int, int]
    entries: list[dict[str, Any]]
    places: list[Place]


class SampleStore:
    """The samples of a run directory. Not for several threads at once.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        #: The trained entry of rewards that are dicts.
        self.reward_key: str | None = None
        self._steps: OrderedDict[tuple[str, int], _Step] = OrderedDict()

    def entries(self, kind: str, step: int, text: str = "") -> list[dict[str, Any]]:
        """Return the entries of a step's samples for the list, in order.

        Args:
            kind: ``train`` or ``eval``.
            step: the step.
            text: only samples whose prompt, response, label or calls contain it, in upper or lower case.

        Raises:
            MilesError: the samples of that step are not on disk, or damaged.
        """
        path = self._path(kind, step)
        found = self._index(path, kind, step)
        if not text:
            return found.entries
        wanted = text.lower()
        # the text as it is in the file; quickly excludes most samples. Other letters have several spellings there
        raw = json.dumps(text)[1:-1].lower().encode() if text.isascii() else b""
        try:
            lines = enumerate(line for _, line in read_lines(path))
            return [
                found.entries[number]
                for number, line in lines
                if raw in line.lower() and wanted in _search_text(json.loads(line)).lower()
            ]
        except (*DAMAGE, IndexError) as error:
            raise _damaged(path, error) from error

    def sample(
        self, kind: str, step: int, row: int, tokens: int = TOKENS, characters: int = CHARACTERS
    ) -> dict[str, Any]:
        """Return a sample with its tokens; ``row`` is its number in the file, and the limits are those of its tokens and texts.

        Raises:
            MilesError: as for ``entries``, or no such row.
        """
        path = self._path(kind, step)
        try:
            found = _describe(self._read(kind, step, row), tokens, characters)
            return {**self._index(path, kind, step).entries[row], **found}
        except DAMAGE as error:
            raise _damaged(path, error) from error

    def image(self, kind: str, step: int, row: int, number: int) -> tuple[bytes, str]:
        """Return an image of a sample and its MIME type.

        Raises:
            MilesError: there is none, or its file is not the one that the run read.
        """
        stored = self._read(kind, step, row).get("media") or []
        if not 0 <= number < len(stored):
            raise MilesError(f"sample {row} of step {step} has no image number {number}")
        digest, path = str(stored[number].get("digest")), stored[number].get("path")
        file = Path(path) if isinstance(path, str) else self.run_dir / DIRECTORY / MEDIA / digest
        try:
            shown = digest.isalnum() and file.is_file() and file.stat().st_size <= _LARGEST
            content = file.read_bytes() if shown else b""
        except (OSError, ValueError) as error:
            raise MilesError(
                f"the image {file} cannot be read ({getattr(error, 'strerror', None) or error})"
            ) from error
        kind_of = next((name for start, name in _IMAGES.items() if content.startswith(start)), "")
        if not kind_of or hashlib.sha256(content).hexdigest() != digest:
            raise MilesError(f"{file} is missing, or is not the image that the run read")
        return content, kind_of

    def _path(self, kind: str, step: int) -> Path:
        path = self.run_dir / FILE.format(kind, step)
        if kind not in KINDS or not path.is_file():
            raise MilesError(
                f"{self.run_dir}: the {kind} samples of step {step} are not on disk (a run saves them unless --no-save-rollouts is set, and "
                "deletes the oldest beyond --save-rollouts-size)"
            )
        return path

    def _read(self, kind: str, step: int, row: int) -> dict[str, Any]:
        path = self._path(kind, step)
        places = self._index(path, kind, step).places
        if not 0 <= row < len(places):
            raise MilesError(f"step {step} has no sample {row}: it has {len(places)}")
        try:
            return read_at(path, places[row])
        except DAMAGE as error:
            raise _damaged(path, error) from error

    def _index(self, path: Path, kind: str, step: int) -> _Step:
        try:
            stat = path.stat()
            signature = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            found = self._steps.pop((kind, step), None)
            if found is None or found.signature != signature:
                lines = [(place, _entry(json.loads(line), self.reward_key)) for place, line in read_lines(path)]
                entries = [{"row": row, **entry} for row, (_, entry) in enumerate(lines)]
                found = _Step(signature, entries, [place for place, _ in lines])
        except DAMAGE as error:
            raise _damaged(path, error) from error
        self._steps[kind, step] = found
        if len(self._steps) > _HELD:
            self._steps.popitem(last=False)
        return found


def _damaged(path: Path, error: BaseException) -> MilesError:
    return MilesError(f"{path} cannot be read ({error}): the samples of that step are damaged, as after a power loss")


def _search_text(row: Mapping[str, Any]) -> str:
    """Return what a search looks at."""
    metadata = row.get("metadata") or {}
    calls = [metadata.get(name) for name in ("tool_calls", "turns", "answer") if isinstance(metadata, Mapping)]
    texts = [
        prompt_text(row.get("prompt", "")),
        str(row.get("response", "")),
        "".join(map(str, row.get("pieces") or ())),
    ]
    return "\n".join([*texts, str(row.get("label", "")), json.dumps([c for c in calls if c], ensure_ascii=False)])


def _entry(row: Mapping[str, Any], reward_key: str | None) -> dict[str, Any]:
    """Return what a list shows of a sample."""
    reward, pieces = row.get("reward"), row.get("pieces") or []
    parts = {str(k): _number(v) for k, v in reward.items()} if isinstance(reward, Mapping) else {}
    advantages = [abs(a) for a in row.get("advantages") or () if a is not None]
    return {
        "index": row.get("index"),
        "group": row.get("group"),
        "set": row.get("set") or "",
        "policy": row.get("policy") or "",
        "reward": parts.get(str(reward_key)) if parts else _number(reward),
        "parts": parts,
        "status": str(row.get("status", "")),
        "length": len(pieces),
        "gap": _gap(row),
        "peak": float(f"{max(advantages, default=0.0):.4g}"),
        "images": len(row.get("media") or ()),
        "answers": len(turns_of(row)),
        "preview": ("".join(map(str, pieces[:_PREVIEW])) or str(row.get("response", ""))).strip()[:_PREVIEW],
    }


def _gap(row: Mapping[str, Any]) -> float | None:
    """Return the mean difference between the log-probs of trainer and engine, over the trained tokens; None without any."""
    mask = row.get("loss_mask") or [1] * len(row.get("pieces") or ())
    pairs = zip(row.get("rollout_log_probs") or (), row.get("train_log_probs") or (), mask, strict=False)
    gaps = [abs(q - p) for p, q, kept in pairs if kept and p is not None and q is not None]
    return float(f"{math.fsum(gaps) / len(gaps):.3g}") if gaps else None


def _describe(row: Mapping[str, Any], tokens: int, characters: int) -> dict[str, Any]:
    """Return the rest of a sample: texts, columns of the response's tokens, calls and versions."""
    pieces, mask = row.get("pieces") or [], row.get("loss_mask")
    advantages = row.get("advantages")
    if advantages and len(set(advantages)) == 1:
        advantages = advantages[:1]
    prompt = row.get("prompt", "")
    start = max(0, len(row.get("tokens") or ()) - len(pieces))
    return {
        "prompt": _messages(prompt, characters) if isinstance(prompt, list) else _cut(str(prompt), characters),
        "response": _cut(str(row.get("response", "")), characters) if not pieces else "",
        "label": None if row.get("label") is None else _cut(str(row["label"]), characters),
        "removed": bool(row.get("removed")),
        "pieces": [str(piece) for piece in pieces[:tokens]],
        "mask": mask[:tokens] if mask and not all(mask) else None,
        "engine": _shorten(row.get("rollout_log_probs"), tokens),
        "trainer": _shorten(row.get("train_log_probs"), tokens),
        "advantages": _shorten(advantages, tokens),
        "versions": [[max(0, int(first) - start), version] for first, version in row.get("weight_versions") or ()],
        "turns": turns_of(row),
        "calls": calls_of(row),
    }


def _shorten(values: Sequence[float | None] | None, tokens: int) -> list[float | None] | None:
    return None if values is None else [None if v is None else float(f"{v:.5g}") for v in values[:tokens]]


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]} ... ({len(text) - characters} more characters)"


def _messages(prompt: Sequence[Any], characters: int) -> list[dict[str, Any]]:
    """Return the messages of a prompt: role, the parts of the content (a text, or None for an image), and calls as text."""
    found = []
    for message in prompt:
        message = message if isinstance(message, Mapping) else {"content": message}
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        calls = [c.get("function", c) for c in message.get("tool_calls") or () if isinstance(c, Mapping)]
        shown = [_part(part, characters) for part in parts if part is not None]
        found.append({"role": str(message.get("role", "?")), "parts": shown, "calls": [_call_text(c) for c in calls]})
    return found


def _part(part: Any, characters: int) -> str | None:
    if isinstance(part, Mapping):
        if "text" in part:
            return _cut(str(part["text"]), characters)
        return None if "image" in str(part.get("type")) else _cut(json.dumps(part, default=str), characters)
    return _cut(str(part), characters)


def _call_text(call: Any) -> str:
    return f"{call.get('name', '?')}({call.get('arguments', '')})" if isinstance(call, Mapping) else str(call)


def prompt_text(prompt: Any) -> str:
    """Return a prompt as one text."""
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join("\n".join(filter(None, message["parts"])) for message in _messages(prompt, CHARACTERS))
