"""How the library is found, compiled and kept. Most compilers here are scripts: they compile nothing."""

import shutil
import tempfile
from ctypes import c_int
from pathlib import Path

import pytest

from miles_formats import native
from miles_formats.native import CannotCompileError, Native

#: Notes what it is asked for; writes something where a library would be.
_PRETEND = """#!/bin/sh
case "$*" in *--version) echo "pretend 1"; exit 0;; esac
echo "$@" >> "$NOTES"
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo nothing > "$2"; shift; done
exit 0
"""


@pytest.fixture
def library(tmp_path):
    """A file in C, and one that it includes."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "twice.c").write_text('#include "twice.h"\nint twice(int x) { return TIMES * x; }\n')
    (folder / "twice.h").write_text("#define TIMES 2\n")
    return Native(folder, ("twice.c",), {"twice": [c_int]}, headers=("twice.h",))


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """An empty cache, and no compiler."""
    monkeypatch.delenv("MILES_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "bin").mkdir()


@pytest.fixture
def compiler(tmp_path):
    """``compiler(script, name)`` puts a script where compilers are looked for."""

    def put(script=_PRETEND, name="cc"):
        path = tmp_path / "bin" / name
        path.write_text(script)
        path.chmod(0o755)
        return path

    return put


@pytest.fixture
def compiled(library):
    """Makes the file that stands for the library."""
    return lambda: library.build(native.compiler())


def compiles(tmp_path):
    """What compilers were asked for."""
    return (tmp_path / "notes").read_text().splitlines()


def test_without_a_compiler_it_says_what_to_install(library):
    assert library.why_not() == "no C compiler is here (install gcc or clang, or name one in CC)"
    with pytest.raises(CannotCompileError, match="install gcc or clang"):
        library.library()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'cc: fatal: no space left' >&2; echo 'and more' >&2; exit 1", "cc: fatal: no space left"),
        ("exit 3", "no output"),
    ],
)
def test_a_compiler_that_fails_is_quoted(library, compiler, tmp_path, script, said):
    path = compiler(f"#!/bin/sh\n[ $1 = --version ] && exit 0\n{script}\n")
    assert library.why_not().startswith(f"{path} does not compile ")
    assert library.why_not().endswith(f": {said}")
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.parametrize("named", ["missing/cc -O1", "bin/broken"])
def test_a_compiler_that_does_not_run_is_named(library, compiler, monkeypatch, tmp_path, named):
    compiler("#!/bin/sh\nexit 1\n", "broken")
    monkeypatch.setenv("CC", f"{tmp_path}/{named}")
    assert library.why_not().startswith(f"the C compiler {tmp_path}/{named} does not run (")


def test_a_cc_that_is_no_command_is_quoted(library, monkeypatch):
    monkeypatch.setenv("CC", "cc 'unclosed")
    assert library.why_not() == """CC is "cc 'unclosed", which is not a command (No closing quotation)"""


def test_cc_names_the_compiler(compiled, compiler, monkeypatch, tmp_path):
    compiler("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("CC", f"{compiler(name='another')} -DHERE")
    compiled()
    (line,) = compiles(tmp_path)
    assert line.startswith("-DHERE ")


def test_compilers_are_tried_in_turn(compiler):
    clang = compiler(name="clang")
    assert native.compiler() == [str(clang)]
    gcc = compiler(name="gcc")
    assert native.compiler() == [str(gcc)]


def test_a_compiler_without_openmp_is_asked_for_less(compiled, compiler, tmp_path):
    compiler(_PRETEND.replace("while", 'case "$*" in *-fopenmp*) echo no OpenMP >&2; exit 1;; esac\nwhile'))
    assert compiled().is_file()
    assert "-fopenmp" in compiles(tmp_path)[0] and "-fopenmp" not in compiles(tmp_path)[-1]


def test_it_is_compiled_once(compiled, compiler, tmp_path):
    compiler()
    path = compiled()
    assert compiled() == path and len(compiles(tmp_path)) == 1
    assert path.parent == tmp_path / "cache" / "miles" / "kernels"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_library_that_was_cut_off_in_the_cache_is_compiled_again(compiled, compiler, tmp_path):
    compiler()
    path = compiled()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])  # loading it would end this process with SIGBUS
    assert compiled() == path and path.read_bytes() == whole and len(compiles(tmp_path)) == 2


def changed_source(monkeypatch, tmp_path):
    (tmp_path / "sources" / "twice.h").write_text("#define TIMES 3\n")


@pytest.mark.parametrize(
    "change",
    [
        changed_source,
        lambda monkeypatch, tmp_path: monkeypatch.setattr(native, "_COMMON", [*native._COMMON, "-g"]),
        lambda monkeypatch, tmp_path: monkeypatch.setattr(native, "_FLAGS", native._FLAGS[1:]),
        lambda monkeypatch, tmp_path: monkeypatch.setattr(native, "_processor", lambda: "another"),
        lambda monkeypatch, tmp_path: (tmp_path / "bin" / "cc").write_text(_PRETEND.replace("pretend 1", "pretend 2")),
    ],
    ids=["source", "options", "flags", "processor", "compiler"],
)
def test_something_else_makes_another(compiled, compiler, monkeypatch, tmp_path, change):
    compiler()
    first = compiled()
    change(monkeypatch, tmp_path)
    assert compiled() != first and len(compiles(tmp_path)) == 2
    assert first.is_file()


@pytest.mark.parametrize("how", ["a file is in the way", "not writable", "writable by others"])
def test_a_cache_that_cannot_be_written_is_done_without(compiled, compiler, monkeypatch, tmp_path, how):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.setenv("CC", str(compiler()))
    if how == "not writable":
        monkeypatch.setattr(native.os, "access", lambda *a: False)  # permissions do not stop a superuser
    elif how == "writable by others":
        (tmp_path / "cache" / "miles" / "kernels").mkdir(parents=True)
        (tmp_path / "cache" / "miles" / "kernels").chmod(0o777)
    else:
        (tmp_path / "cache").write_text("")
    assert compiled().is_relative_to(elsewhere)


def test_without_a_home_directory_it_is_done_without_a_cache(compiled, compiler, monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    compiler()
    assert compiled().is_relative_to(elsewhere)


def test_a_damaged_library_is_named(compiled, library, compiler):
    compiler()
    path = compiled()
    assert library.why_not().startswith(f"{path} cannot be loaded (")
    assert library.why_not().endswith("delete it to compile it again")


def test_a_real_compiler_makes_it_once(library, compiler, monkeypatch, tmp_path):
    monkeypatch.undo()
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        pytest.skip("no C compiler is here")
    wrapper = compiler(f'#!/bin/sh\n[ "$1" = --version ] || echo "$@" >> {tmp_path}/notes\nexec {found} "$@"\n')
    monkeypatch.setenv("CC", str(wrapper))
    monkeypatch.delenv("MILES_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert library.why_not() == "" and library.library().twice(21) == 42
    tries = len(compiles(tmp_path))
    again = Native(library.folder, library.sources, library.signatures, library.headers)
    assert again.library().twice(2) == 4 and len(compiles(tmp_path)) == tries
