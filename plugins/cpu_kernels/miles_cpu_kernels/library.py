"""Compiling the C files of this folder for this processor, once, and calling it.

A wheel cannot hold the result: what is fast on one processor does not run on the next. The source is plain C without PyTorch's headers,
so any C compiler takes about a second, and the library is kept in the user's cache under a name that says what it was made from.
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
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

from miles_core import MilesError, cpu_info

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = ("steps.c", "attention.c", "experts.c")
#: Tried in turn: Apple's compiler has no OpenMP, and some compilers no -march=native. Without OpenMP there is one thread.
_FLAGS: tuple[list[str], ...] = (
    ["-march=native", "-fopenmp"],
    ["-mcpu=native", "-fopenmp"],
    ["-mcpu=native"],
    ["-march=native"],
    [],
)
_COMMON = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-Wno-psabi", "-Wno-unknown-pragmas"]

_size, _pointer, _int = c_int64, c_void_p, c_int
#: Arguments of each function, in the order of the C files.
_SIGNATURES: dict[str, list] = {
    "rms_norm": [*[_pointer] * 4, *[_size] * 2, c_float, _int],
    "rms_norm_backward": [*[_pointer] * 7, *[_size] * 3, _int],
    "rotate": [*[_pointer] * 4, *[_size] * 3, _int, _int],
    "sort_choices": [*[_pointer] * 6, *[_size] * 3],
    "log_probs": [*[_pointer] * 4, *[_size] * 2, _int],
    "log_probs_backward": [*[_pointer] * 5, *[_size] * 2, _int],
    "gather_sum": [*[_pointer] * 4, *[_size] * 3, _int],
    "experts": [*[_pointer] * 7, *[_size] * 3, _int],
    "experts_backward": [*[_pointer] * 11, *[_size] * 3, _int],
    "tree_attention": [*[_pointer] * 4, *[_size] * 6, c_float, *[_pointer] * 2, _int],
    "tree_attention_backward": [*[_pointer] * 7, *[_size] * 6, c_float, *[_pointer] * 3, _int],
}


class Slab(ctypes.Structure):
    """Keys and values of one store of the cache at one layer (``attention.c``)."""

    _fields_ = (("k", c_void_p), ("v", c_void_p), ("k_capacity", c_int64), ("v_capacity", c_int64))


_SIGNATURES["cached_attention"] = [
    *[_pointer] * 3,
    *[POINTER(Slab)] * 2,
    *[_pointer] * 5,
    *[_size] * 6,
    c_float,
    _pointer,
    _int,
]


class CannotCompileError(MilesError):
    """No C compiler here makes the library; the text says what to install, or what the compiler said."""


def library() -> ctypes.CDLL:
    """The compiled functions; CannotCompileError when there are none."""
    found = _library()
    if isinstance(found, CannotCompileError):
        raise found
    return found


def why_not() -> str:
    """Why ``library`` would raise; empty when it would not."""
    found = _library()
    return str(found) if isinstance(found, CannotCompileError) else ""


@cache
def _library() -> ctypes.CDLL | CannotCompileError:
    try:
        return _load(_compiled(_compiler()))
    except CannotCompileError as error:
        return error


def _compiler() -> list[str]:
    """The command of a C compiler: ``CC``, or the first of the usual names."""
    named = os.environ.get("CC")
    if named:
        try:
            return shlex.split(named)
        except ValueError as error:
            raise CannotCompileError(f"CC is {named!r}, which is no command ({error})") from error
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise CannotCompileError("no C compiler is here (install gcc or clang, or name one in CC)")


def _compiled(compiler: Sequence[str]) -> Path:
    """The library made by this compiler for this processor, from the cache if it is there."""
    if os.name != "posix":
        raise CannotCompileError("the kernels are for Linux and macOS")
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotCompileError(f"the C compiler {shlex.join(compiler)} does not run ({error})") from error
    made_from = repr(
        [[(_FOLDER / name).read_bytes() for name in (*_SOURCES, "vector.h")], version, _COMMON, _FLAGS, _processor()]
    )
    directory = _cache()
    stem = f"kernels-{hashlib.sha256(made_from.encode()).hexdigest()[:20]}"
    for known in directory.glob(f"{stem}-*.so"):
        if known.name == _named(stem, known):
            return known
        log.warning("%s is not what was compiled (a full disk, or a crash); it is compiled again", known)
        known.unlink(missing_ok=True)
    said = ""
    for flags in _FLAGS:
        handle, temporary = tempfile.mkstemp(dir=directory, suffix=".so")
        command = [*compiler, *_COMMON, *flags, "-o", temporary, *(str(_FOLDER / name) for name in _SOURCES), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            os.fsync(handle)  # a name on the disk without its bytes would end later runs with SIGBUS
            os.close(handle)
            target = directory / _named(stem, Path(temporary))
            os.replace(temporary, target)
            return target
        os.close(handle)
        os.unlink(temporary)
        said = said or (done.stderr.strip().splitlines() or ["no output"])[0]
    raise CannotCompileError(f"{shlex.join(compiler)} does not compile {_FOLDER}: {said}")


def _named(stem: str, file: Path) -> str:
    """The name that a library of these bytes has in the cache."""
    return f"{stem}-{hashlib.sha256(file.read_bytes()).hexdigest()[:20]}.so"


def _load(path: Path) -> ctypes.CDLL:
    import torch  # noqa: F401  # whose OpenMP library the functions then share, with its threads

    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotCompileError(f"{path} cannot be loaded ({error}); delete it to compile it again") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes = arguments
        function.restype = c_int
    return found


def _cache() -> Path:
    """Where compiled libraries are kept: a directory that nobody but this user can write to, else one for this process."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles-core"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = root.stat()
        if os.access(root, os.W_OK) and state.st_uid == os.getuid() and not state.st_mode & 0o022:
            return root
        why = f"{root} is not this user's alone to write to"
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory
        why = str(error)
    log.info("compiled kernels are not kept for the next run: %s", why)
    directory = tempfile.mkdtemp(prefix="miles-core-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _processor() -> str:
    """What ``-march=native`` depends on."""
    lines = [x for x in cpu_info().splitlines() if x.startswith(("model name", "flags", "Features"))]
    return "\n".join(dict.fromkeys(lines)) or f"{platform.machine()} {platform.processor()}"
