"""Compiles C files for this processor, caches the library, and provides its functions.

A wheel cannot contain the library, because code optimised for one processor does not run on others. The source is plain C without PyTorch's
headers, so compiling takes about one second. The library is stored in the user's cache under a name derived from its inputs.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.cache_folder import cache_folder
from miles_core.errors import MilesError
from miles_core.observe.environment import cpu_info

__all__ = ["Native"]

log = logging.getLogger(__name__)

#: Flags to try in order: Apple's compiler lacks OpenMP, and some compilers lack -march=native. Without OpenMP, kernels use one thread.
_FLAGS: tuple[list[str], ...] = (
    ["-march=native", "-fopenmp"],
    ["-mcpu=native", "-fopenmp"],
    ["-mcpu=native"],
    ["-march=native"],
    [],
)
_COMMON = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-Wno-psabi", "-Wno-unknown-pragmas"]


class CannotCompileError(MilesError):
    """The library cannot be compiled; the message names what to install, or contains the compiler's error."""


class Native:
    """C functions that are compiled on first use.

    Args:
        folder: directory of the files.
        sources: files that are compiled together.
        signatures: function name -> argument types; all functions return an int.
        headers: files in ``folder`` that the sources include.
    """

    def __init__(
        self, folder: Path, sources: Sequence[str], signatures: Mapping[str, list[Any]], headers: Sequence[str] = ()
    ) -> None:
        self.folder, self.sources, self.headers, self.signatures = folder, sources, headers, signatures
        self._found: ctypes.CDLL | CannotCompileError | None = None

    def library(self) -> ctypes.CDLL:
        """Return the compiled library. Raises CannotCompileError if it cannot be compiled."""
        found = self._try_load()
        if isinstance(found, CannotCompileError):
            raise found
        return found

    def why_not(self) -> str:
        """Return the reason why ``library`` would raise; empty if it would not."""
        found = self._try_load()
        return str(found) if isinstance(found, CannotCompileError) else ""

    def _try_load(self) -> ctypes.CDLL | CannotCompileError:
        if self._found is None:
            try:
                self._found = self._load(self.build(compiler()))
            except CannotCompileError as error:
                self._found = error
        return self._found

    def build(self, compiler: Sequence[str]) -> Path:
        """The library made by this compiler for this processor, from the cache if it is there."""
        if os.name != "posix":
            raise CannotCompileError("the C kernels support Linux and macOS only")
        try:
            version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise CannotCompileError(f"the C compiler {shlex.join(compiler)} does not run ({error})") from error
        files = [(self.folder / name).read_bytes() for name in (*self.sources, *self.headers)]
        made_from = repr([files, version, _COMMON, _FLAGS, _processor()])
        directory = _cache()
        stem = f"kernels-{hashlib.sha256(made_from.encode()).hexdigest()[:20]}"
        for known in directory.glob(f"{stem}-*.so"):
            if known.name == _named(stem, known):
                return known
            log.warning("%s is not what was compiled (a full disk, or a crash); it is compiled again", known)
            known.unlink(missing_ok=True)
        return self._compile(compiler, directory, stem)

    def _compile(self, compiler: Sequence[str], directory: Path, stem: str) -> Path:
        """Compile the library and return its path."""
        said = ""
        for flags in _FLAGS:
            handle, temporary = tempfile.mkstemp(dir=directory, suffix=".so")
            files = [str(self.folder / name) for name in self.sources]
            done = subprocess.run(
                [*compiler, *_COMMON, *flags, "-o", temporary, *files, "-lm"], capture_output=True, text=True
            )
            if done.returncode == 0:
                os.fsync(handle)  # after a crash, a file name without its data would kill later runs with SIGBUS
                os.close(handle)
                target = directory / _named(stem, Path(temporary))
                os.replace(temporary, target)
                return target
            os.close(handle)
            os.unlink(temporary)
            said = said or (done.stderr.strip().splitlines() or ["no output"])[0]
        raise CannotCompileError(f"{shlex.join(compiler)} does not compile {self.folder}: {said}")

    def _load(self, path: Path) -> ctypes.CDLL:
        import torch  # noqa: F401  # so that the library shares torch's OpenMP threads

        try:
            found = ctypes.CDLL(str(path))
        except OSError as error:
            raise CannotCompileError(f"{path} cannot be loaded ({error}); delete it to compile it again") from error
        for name, arguments in self.signatures.items():
            function = getattr(found, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
        return found


def compiler() -> list[str]:
    """Return the command of a C compiler: ``CC``, or the first common name that exists."""
    named = os.environ.get("CC")
    if named:
        try:
            return shlex.split(named)
        except ValueError as error:
            raise CannotCompileError(f"CC is {named!r}, which is not a command ({error})") from error
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise CannotCompileError("no C compiler is here (install gcc or clang, or name one in CC)")


def _named(stem: str, file: Path) -> str:
    """Return the cache name of a library with these bytes."""
    return f"{stem}-{hashlib.sha256(file.read_bytes()).hexdigest()[:20]}.so"


def _cache() -> Path:
    """Return the cache directory, which only this user may write to; if that is not possible, a temporary directory of this process."""
    try:
        root = cache_folder() / "kernels"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = root.stat()
        if os.access(root, os.W_OK) and state.st_uid == os.getuid() and not state.st_mode & 0o022:
            return root
        why = f"{root} is writable by other users"
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory
        why = str(error)
    log.info("compiled kernels are not kept for the next run: %s", why)
    directory = tempfile.mkdtemp(prefix="miles-core-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _processor() -> str:
    """Return a description of this processor, on which ``-march=native`` depends."""
    lines = [x for x in cpu_info().splitlines() if x.startswith(("model name", "flags", "Features"))]
    return "\n".join(dict.fromkeys(lines)) or f"{platform.machine()} {platform.processor()}"
