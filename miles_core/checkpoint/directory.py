"""Checkpoint directories, saved and verified atomically.

``Checkpoints`` manages ``<directory>/step_00000012``. A save fills a hidden sibling directory, flushes it to the disk, records
the size and digest of every file in ``manifest.json`` and renames the directory into place. An error before the rename leaves
the earlier checkpoints untouched. A load first verifies every file against the manifest and reports truncated or edited
files. Nothing is pickled: tensors are stored as safetensors, everything else as JSON.

This module does not define the contents: the trainer writes its own directory, plugins and the loop use a ``Store``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.checkpoint.digest import CHUNK, FileDigest, digest_files, flush
from miles_core.errors import CheckpointError
from miles_core.version import __version__

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 2
#: Formats that can be loaded. Digests of format 1 are plain hashes.
_READABLE = (1, 2)
_STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Difference:
    """A difference between a checkpoint's plan and the current plan.

    Attributes:
        name: name of the fact, option, plugin or setting that differs, e.g. ``train.precision``.
        saved: value in the checkpoint's plan.
        current: value in the current plan.
        fatal: whether the difference prevents resuming (model shape, number format).
    """

    name: str
    saved: Any
    current: Any
    fatal: bool

    def __str__(self) -> str:
        return f"{self.name} was {self.saved}, is now {self.current}"


#: Facts that must be equal for saved weights and optimiser states to be usable: the model's shape and the training precision.
FATAL = ("model.type", "model.hidden_size", "model.layers", "model.num_experts", "model.vocab_size", "train.precision")

#: Options of the table ``run`` that affect only where a run is stored and how it is shown, and change no step.
STORAGE_OPTIONS = frozenset(
    {
        *("save", "load", "keep", "save_interval", "async_save", "save_rollouts", "save_rollouts_size", "export_hf"),
        *("log_level", "profile", "profile_dir", "stop_within"),
    }
)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: directory of the checkpoints; created by the first save, but not its parent, so that a run whose file system is gone
            does not continue on the local disk.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of ``step``, whether or not it exists."""
        return self.directory / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        if not self.directory.is_dir():
            return []
        entries = (entry for entry in self.directory.iterdir() if entry.is_dir() and any(entry.iterdir()))
        matches = (_STEP.fullmatch(entry.name) for entry in entries)  # an empty directory is not a checkpoint
        return sorted(int(match[1]) for match in matches if match)

    def find_latest(self) -> int | None:
        """Return the last step that has a checkpoint, or None."""
        return max(self.steps(), default=None)

    def recover(self) -> None:
        """Repair the directory after a process died during a save. No other process may write to it during the call."""
        for aside in self.directory.glob(".step_*.replaced"):
            final = aside.with_name(aside.name[1 : -len(".replaced")])
            if final.exists():
                shutil.rmtree(aside)
            else:
                aside.rename(final)
        for dropped in self.directory.glob(".step_*.dropped"):
            shutil.rmtree(dropped, ignore_errors=True)

    def keep(self, count: int) -> None:
        """Delete all but the last ``count`` checkpoints. Renames each one first, so that no partial checkpoint is ever visible."""
        for step in self.steps()[:-count]:
            path = self.path(step)
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.dropped")), ignore_errors=True)

    @contextmanager
    def save(self, step: int, plan: Mapping[str, Any] | None = None) -> Iterator[Path]:
        """Yield an empty directory, which becomes the checkpoint of ``step`` when the block exits without an error.

        The block may call ``seal``, which takes long; otherwise it is called at the exit.

        Args:
            step: number of completed steps.
            plan: the plan as JSON data, stored in the manifest and compared by ``load``.

        Raises:
            CheckpointError: the disk is full or not writable. The earlier checkpoints are unchanged.
        """
        final = self.path(step)
        work = self.directory / f".{final.name}.saving"
        try:
            self.directory.mkdir(exist_ok=True)
            self.recover()
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            yield work
            if not (work / MANIFEST).exists():
                seal(work, step, plan)
            self._replace(work, final)
        except BaseException as error:
            written = _size(work)
            shutil.rmtree(work, ignore_errors=True)
            if isinstance(error, CheckpointError) or not is_io(error):
                raise
            raise self._cannot_save(step, written, error) from error

    def load(self, step: int | None = None, plan: Mapping[str, Any] | None = None) -> Path:
        """Verify a checkpoint and return its directory.

        Args:
            step: step of the checkpoint; by default the latest.
            plan: the current plan as JSON data, compared with the saved one (``compare_plans``); None skips the comparison.

        Raises:
            CheckpointError: the checkpoint does not exist or is incomplete or damaged (names the file), or its plan is
                incompatible with ``plan`` (lists the differences).
        """
        steps = self.steps()
        chosen = steps[-1] if step is None and steps else step
        if not steps and (self.directory.parent / "config.yaml").is_file():
            raise CheckpointError(
                f"{self.directory} is empty: the run ended before its first checkpoint; start it again with --config "
                f"{self.directory.parent / 'config.yaml'} and another --save"
            )
        if chosen is None or chosen not in steps:
            have = f"it has steps {', '.join(map(str, steps))}" if steps else "it has none"
            wanted = "a checkpoint" if step is None else f"the checkpoint of step {step}"
            raise CheckpointError(f"{wanted} was requested in {self.directory}, but {have}; check --load")
        path = self.path(chosen)
        manifest = check_files(path)
        if plan is not None:
            _check_plan(path, manifest.get("plan"), plan)
        return path

    def _replace(self, work: Path, final: Path) -> None:
        """Rename ``work`` to ``final``. An existing ``final`` is renamed first; after a crash, ``recover`` restores it."""
        aside = final.with_name(f".{final.name}.replaced")
        if final.exists():
            final.rename(aside)
        work.rename(final)
        flush(self.directory)
        shutil.rmtree(aside, ignore_errors=True)

    def _cannot_save(self, step: int, written: int, error: BaseException) -> CheckpointError:
        earlier = [_size(self.path(s)) for s in self.steps()]
        safe = f"the {len(earlier)} earlier checkpoints there are untouched" if earlier else "nothing was left there"
        if _no_space(error):
            # does not report the free space, which has changed: the partial checkpoint is already deleted
            size = f" (an earlier checkpoint has {max(earlier):,} bytes)" if earlier else ""
            return CheckpointError(
                f"the disk is full: saving step {step} in {self.directory} failed after {written:,} bytes{size}; {safe}. Free space there "
                "or choose another --save"
            )
        lost = "" if self.directory.parent.is_dir() else "the run's directory is gone (a lost file system?)"
        return CheckpointError(f"cannot save step {step} in {self.directory}: {lost or f'{error}; {safe}'}")


def check_files(path: Path | str) -> dict[str, Any]:
    """Verify every file of the checkpoint at ``path`` against its manifest and return the manifest.

    Raises:
        CheckpointError: a file is missing, truncated or changed; names the first such file.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    saved: dict[str, FileDigest] = manifest["files"]
    for name, entry in saved.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path}: file {name} is missing; use an earlier checkpoint")
        size = file.stat().st_size
        if size != entry.size:
            raise CheckpointError(
                f"checkpoint {path}: file {name} has {size:,} bytes, {entry.size:,} were saved; use an earlier checkpoint"
            )
    found = digest_files({path / name: entry.chunk for name, entry in saved.items()})
    for name, entry in saved.items():
        if found[path / name] != entry:
            raise CheckpointError(
                f"checkpoint {path}: the contents of {name} changed after it was saved (its digest differs); "
                "use an earlier checkpoint"
            )
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint of a run: it has no {MANIFEST}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["format"]
        files = {name: FileDigest.from_json(entry) for name, entry in manifest["files"].items()}
        plan = manifest.get("plan")
        if not files:
            raise ValueError("it lists no file")
        if plan is not None:
            compare_plans(plan, plan)  # raises if an entry needed for the comparison is missing or malformed
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({error!r}); use an earlier checkpoint") from error
    if version not in _READABLE:
        raise CheckpointError(
            f"{path} has checkpoint format {version}, this version of miles-core ({__version__}) reads {_READABLE[0]} to {FORMAT}"
        )
    return {**manifest, "files": files}


def _check_plan(path: Path, saved: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> None:
    if saved is None:
        raise CheckpointError(f"checkpoint {path} records no plan, so it cannot be compared with this run's")
    fatal = [str(d) for d in compare_plans(saved, plan) if d.fatal]
    if fatal:
        raise CheckpointError(
            f"checkpoint {path} was saved by a run that this one cannot continue: {'; '.join(fatal)}. "
            "Give the saved values again, or start a new run from its weights with --hf-checkpoint"
        )


def changes(path: Path, plan: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between the plan of the checkpoint at ``path`` and the current plan."""
    return compare_plans(_read_manifest(path).get("plan") or {}, plan)


def compare_plans(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between two plans (as JSON data, see ``Plan.to_json``).

    Compares plugins, the values that plugins set, options except ``STORAGE_OPTIONS``, and the facts that the rules of either plan read.
    A change of a fact in ``FATAL`` or of a ``fixed`` option is fatal. An option whose name changed is recognized by its flag.
    """
    before = {fact["name"] for fact in saved.get("facts", ())}
    now = {fact["name"] for fact in current.get("facts", ())}
    renamed = {f["flag"]: f["name"] for f in current.get("facts", ()) if f.get("flag") and f["name"] not in before}
    facts = [
        f if f["name"] in now else {**f, "name": renamed.get(f.get("flag"), f["name"])} for f in saved.get("facts", ())
    ]
    saved = {**saved, "facts": facts}
    both = [fact for plan in (saved, current) for fact in plan.get("facts", ())]
    options = {fact["name"] for fact in both if fact.get("flag")} - STORAGE_OPTIONS - {"plugins"}
    fixed = {*FATAL, *(fact["name"] for fact in both if fact.get("fixed"))}
    consulted = {*saved.get("consulted", ()), *current.get("consulted", ()), *options, *fixed}
    old, new = _comparable(saved, consulted), _comparable(current, consulted)
    differences = []
    for name in dict.fromkeys([*old, *new]):
        was, value = old.get(name, "absent"), new.get(name, "absent")
        if was != value:
            differences.append(Difference(name, was, value, name in fixed and name in old and name in new))
    return differences


def _comparable(plan: Mapping[str, Any], consulted: set[str]) -> dict[str, Any]:
    """Return the entries of a plan that ``compare_plans`` compares: name -> value."""
    entries = {"miles-core": plan.get("core")}
    entries |= {f"plugin {p['name']}": p["version"] for p in plan.get("plugins", ())}
    entries |= {f"setting {s['path']}": s["value"] for s in plan.get("sets", ())}
    facts = (f for f in plan.get("facts", ()) if f["name"] in consulted and f.get("state", "KNOWN") == "KNOWN")
    return entries | {f["name"]: f["value"] for f in facts}


def locate_checkpoint(source: Path | str, plan: Mapping[str, Any] | None = None) -> Path:
    """Verify the checkpoint selected by ``--load`` and return its directory.

    Args:
        source: a run directory or its ``checkpoints`` directory (selects the latest step), or the directory of one step.
        plan: the current plan as JSON data, compared with the saved one.

    Raises:
        CheckpointError: there is no checkpoint, a file is damaged, or the saved plan is incompatible.
    """
    source = Path(source)
    if not source.is_dir():
        raise CheckpointError(f"--load {source}: no such directory; give a run directory or one of its checkpoints")
    match = _STEP.fullmatch(source.resolve().name)
    if match:
        return Checkpoints(source.resolve().parent).load(int(match[1]), plan)
    inside = source / "checkpoints"
    return Checkpoints(inside if inside.is_dir() else source).load(None, plan)


def run_of(source: Path | str) -> Path:
    """Return the run directory of a ``--load`` path, which names the run, its ``checkpoints`` directory, or one step."""
    source = Path(source)
    if _STEP.fullmatch(source.resolve().name):
        return source.resolve().parent.parent
    if not (source / "checkpoints").is_dir() and Checkpoints(source).steps():
        return source.parent
    return source


def checkpoint_step(directory: Path) -> int:
    """Return the number of completed steps, parsed from the name of a checkpoint directory."""
    match = _STEP.fullmatch(directory.name)
    if match is None:
        raise ValueError(f"{directory} is not named like a checkpoint")
    return int(match[1])


def seal(
    work: Path, step: int, plan: Mapping[str, Any] | None, digests: Mapping[str, FileDigest] | None = None
) -> None:
    """Write the manifest and flush all other files and directories to the disk.

    Args:
        work: directory of a new checkpoint.
        step: number of completed steps.
        plan: the plan as JSON data.
        digests: digests of files that were flushed by the process that wrote them; all others are computed.
    """
    known = digests or {}
    others = [file for file in work.rglob("*") if file.is_file() and file.relative_to(work).as_posix() not in known]
    for file in others:
        flush(file)
    found = digest_files(dict.fromkeys(others, CHUNK))
    files = {**known, **{file.relative_to(work).as_posix(): digest for file, digest in found.items()}}
    entries = {name: files[name].to_json() for name in sorted(files)}
    manifest = {"format": FORMAT, "step": step, "miles_core": __version__, "plan": plan, "files": entries}
    with (work / MANIFEST).open("w", encoding="utf-8") as out:
        out.write(json.dumps(manifest))
        out.flush()
        os.fsync(out.fileno())
    for directory in (*(p for p in work.rglob("*") if p.is_dir()), work):
        flush(directory)


def _size(directory: Path) -> int:
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file()) if directory.is_dir() else 0


def _no_space(error: BaseException) -> bool:
    # safetensors writes from Rust and reports the errno only in its message.
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "No space left on device" in str(error) or "Disk quota exceeded" in str(error)


def is_io(error: BaseException) -> bool:
    """Whether ``error`` is an input/output error of Python, safetensors or tokenizers."""
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError" or _no_space(error)
