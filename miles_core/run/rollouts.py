"""Writes and reads every sample of training and evaluation.

``RUN/rollouts/train/00000012.jsonl.gz`` holds the samples that step 12 trained on, ``RUN/rollouts/eval/00000012.jsonl.gz`` the
evaluation samples after it: one JSON object per line, compressed with gzip. A file always holds all samples of its step.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.contracts.runtime import TrainedTokens
from miles_core.data.sample import Sample
from miles_core.errors import MilesError
from miles_core.redact import redact_variables

DIRECTORY = "rollouts"
KINDS = ("train", "eval")
SUFFIX = ".jsonl.gz"


def rollout_file(run_dir: Path | str, kind: str, step: int) -> Path:
    """Return the path of a step's samples, whether it exists or not."""
    return Path(run_dir) / DIRECTORY / kind / f"{step:08d}{SUFFIX}"


def rollout_files(run_dir: Path | str, kind: str = "train") -> dict[int, Path]:
    """Return step -> file for all steps with samples on disk, in ascending order."""
    found = (Path(run_dir) / DIRECTORY / kind).glob(f"*{SUFFIX}")
    steps = {int(number): path for path in found if (number := path.name.removesuffix(SUFFIX)).isdigit()}
    return dict(sorted(steps.items()))


def read_rollouts(run_dir: Path | str, kind: str = "train", step: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the saved samples of a run as mappings, in order of steps.

    Args:
        run_dir: the run directory (``--save``).
        kind: ``train``, or ``eval`` for evaluation samples.
        step: read only this step; by default all steps on disk.

    Raises:
        MilesError: no such kind, or no samples of that step on disk.
    """
    if kind not in KINDS:
        raise MilesError(f"rollouts of kind {kind!r} do not exist; it is one of {', '.join(KINDS)}")
    files = rollout_files(run_dir, kind)
    if step is not None:
        if step not in files:
            have = f"those of steps {min(files)} to {max(files)} are" if files else "none are"
            raise MilesError(f"{run_dir}: the {kind} samples of step {step} are not on disk; {have}")
        files = {step: files[step]}
    for path in files.values():
        yield from read_file(path) or ()


def read_file(path: Path) -> list[dict[str, Any]] | None:
    """Return the samples of one file; None with a warning if the file is damaged, as after a power loss."""
    try:
        if not path.stat().st_size:
            raise EOFError("it is empty")
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            return [dict(json.loads(line)) for line in file]
    except (OSError, EOFError, zlib.error, ValueError, TypeError, RecursionError) as error:
        log.warning("%s cannot be read (%s); the samples of that step are skipped", path, error)
        return None


log = logging.getLogger(__name__)

#: gzip level 1 takes a third of the time of the default level; the files are a fifth larger.
LEVEL = 1
#: Number of the newest files of each kind that a resumed run reads: those that a power loss may have damaged.
CHECKED = 4


class RolloutFiles:
    """Writes the samples of each step to a separate file, and deletes the oldest files beyond a total size.

    A file is written under a temporary name and then renamed, so a killed process never leaves a partial file.

    Args:
        run_dir: the run directory; no other process writes there.
        tokenizer: converts tokens to text.
        limit: maximum total size of all files in bytes.
        start: the step from which the run continues; files of later steps are deleted, because these steps are repeated.
    """

    def __init__(self, run_dir: Path, tokenizer: Any, limit: int, start: int) -> None:
        self.run_dir, self.limit = run_dir, limit
        self._pieces = Pieces(tokenizer)
        self._limit_logged = False
        for torn in (run_dir / DIRECTORY).glob("*/*.part"):
            torn.unlink()
        self.roll_back(start)
        newest = [path for kind in KINDS for path in list(rollout_files(run_dir, kind).values())[-CHECKED:]]
        if count := sum(read_file(path) is None for path in newest):
            log.warning(
                "%d of the %d newest files with saved samples are damaged: the report leaves them out",
                count,
                len(newest),
            )

    def roll_back(self, step: int) -> None:
        """Delete the samples of all steps after ``step``."""
        self._sizes: dict[tuple[int, str], int] = {}
        for kind in KINDS:
            for number, path in rollout_files(self.run_dir, kind).items():
                if number > step:
                    path.unlink()
                else:
                    self._sizes[number, kind] = path.stat().st_size

    def write(self, kind: str, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Write the samples of a step; ``rows`` are results of ``row``.

        Raises:
            MilesError: the file cannot be written (a full disk).
        """
        text = redact_variables("".join(_line({"step": step, **row}) for row in rows))
        packed = gzip.compress(text.encode(), LEVEL, mtime=0)
        target = rollout_file(self.run_dir, kind, step)
        part = target.with_suffix(".part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(packed)
            part.replace(target)
        except OSError as error:
            raise MilesError(
                f"cannot write the samples of step {step} to {target}: {error.strerror}; free space there and resume the run, "
                "or resume it with --no-save-rollouts"
            ) from error
        self._sizes[step, kind] = len(packed)
        self._forget_oldest(step)

    def row(self, sample: Sample, trained: TrainedTokens | None = None, data_set: str = "") -> dict[str, Any]:
        """Convert a sample to a JSON row, without the fields of plugins.

        Args:
            sample: a finished sample with its reward.
            trained: values recorded in training; None if there are none.
            data_set: name of its evaluation set.
        """
        response = sample.tokens[sample.prompt_length :]
        return {
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
            "tokens": sample.tokens,
            "pieces": [self._pieces[token] for token in response],
            "loss_mask": sample.loss_mask,
            "rollout_log_probs": _round(sample.rollout_log_probs),
            "train_log_probs": _round(trained.log_probs if trained else None),
            "advantages": _round(trained.advantages if trained else None),
        }

    def _forget_oldest(self, newest: int) -> None:
        total = sum(self._sizes.values())
        for step, kind in sorted(self._sizes):
            if total <= self.limit or step == newest:
                return
            if not self._limit_logged:
                log.info("samples on disk exceed --save-rollouts-size %d: the oldest steps are deleted", self.limit)
                self._limit_logged = True
            rollout_file(self.run_dir, kind, step).unlink(missing_ok=True)
            total -= self._sizes.pop((step, kind))


class Pieces(dict[int, str]):
    """Cache token id -> text. A token that is a part of a character is shown as one replacement character."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        name = self.tokenizer.convert_ids_to_tokens(token)
        text = str(self.tokenizer.decode([token]))
        # SentencePiece marks a leading space, but decoding a single token drops it
        self[token] = f" {text}" if str(name).startswith("\u2581") and not text.startswith(" ") else text
        return self[token]


def _line(row: dict[str, Any]) -> str:
    """Encode a row as strict JSON. User functions may have put arbitrary objects into it."""
    try:
        return json.dumps(row, default=str, allow_nan=False) + "\n"
    except (ValueError, TypeError, RecursionError):  # non-finite number, non-string key, circular reference
        return json.dumps(_plain(row), allow_nan=False) + "\n"


def _plain(value: Any, depth: int = 0) -> Any:
    """Convert ``value`` to JSON types: keys become strings, non-finite numbers None, other objects their ``str``."""
    if isinstance(value, dict) and depth < 20:
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and depth < 20:
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)[:1000]


def _round(values: Sequence[float] | np.ndarray | None) -> list[float | None] | None:
    """Round to six decimal places; non-finite values become None."""
    if values is None:
        return None
    array = np.round(np.asarray(values, np.float64), 6)
    rounded: list[float | None] = array.tolist()
    for bad in np.flatnonzero(~np.isfinite(array)):
        rounded[bad] = None
    return rounded
