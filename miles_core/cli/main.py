"""The entry point of ``miles``: dispatches to a command and converts errors to messages and exit codes.

Exit codes: 0 success, 1 a defect (with its traceback), 2 a user error (one message on stderr), 130 interrupted (143 by SIGTERM, 129 by
SIGHUP). Core provides the command ``train``; installed plugins add others in their manifests (``Plugin.commands``). A command is
imported only when it is called. Functions import everything of miles, so that Ctrl-C is also handled while modules are imported.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence

DEBUG = "MILES_DEBUG"
#: Error numbers that indicate a problem of a path, not of the program.
_PATHS = {getattr(errno, name) for name in ("ENAMETOOLONG", "ELOOP", "EISDIR", "ENOTDIR", "EROFS", "EACCES", "EPERM")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return the exit code."""
    try:
        return _run(argv)
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        print("interrupted", file=sys.stderr)
        return 130


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error. Python 3.11 replaces it by a RuntimeError if it arrives in ``__set_name__``, as in imports."""
    while isinstance(error, Exception):
        error = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt)


def _run(argv: Sequence[str] | None) -> int:
    from miles_core.errors import MilesError
    from miles_core.redact import show_exception

    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process's own command line: redact its tracebacks
        sys.excepthook = show_exception
        gc.set_threshold(50_000)  # until the parts are built, because imports create many objects but no garbage
        atexit.register(gc.freeze)  # at exit the interpreter would search all objects for garbage
    try:
        return _dispatch(words)
    except BrokenPipeError:  # the reader closed the pipe (miles train --help | head); not an error
        if not _is_reader_gone():
            raise  # of another pipe or connection
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MilesError as error:
        if os.environ.get(DEBUG, "0") not in ("", "0"):
            raise
        return _print_lines(str(error), getattr(error, "__notes__", ()))
    except OSError as error:
        message = _explain_path_error(error)
        if not message or os.environ.get(DEBUG, "0") not in ("", "0"):
            raise  # a defect
        return _print_lines(message, getattr(error, "__notes__", ()))


def _is_reader_gone() -> bool:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _explain_path_error(error: OSError) -> str:
    """Return the message for an error caused by a full disk or an invalid path; empty for any other error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f": {error.filename}" if error.filename else ""
        return f"the disk is full{where} ({error.strerror}); free space there"
    return f"{error.filename}: {error.strerror}; check that path" if error.errno in _PATHS and error.filename else ""


def _print_lines(message: str, notes: Sequence[str]) -> int:
    """Print the message and the notes of an error, and return the exit code of a user error."""
    from miles_core.redact import redact, show_controls

    for text in (f"error: {message}", *notes):
        print(show_controls(redact(str(text))), file=sys.stderr)
    return 2


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, rest = words[0], words[1:]
    if name in ("--version", "-V"):
        from miles_core.version import __version__

        print(f"miles-core {__version__}")
        return 0
    from miles_core.cli.commands import CORE_COMMANDS, Commands
    from miles_core.errors import MilesError

    # core's commands read the manifests themselves, for the options; reading them twice would take a tenth of a plan's time
    commands = Commands({}) if name in CORE_COMMANDS else Commands.installed()
    if name not in commands:
        raise MilesError(_explain_unknown(name, commands))
    run: Callable[[list[str]], int] = commands.load(name)
    return run(rest)


def _help() -> str:
    from miles_core.cli.commands import Commands

    summaries = Commands.installed().summaries
    width = max(map(len, summaries))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in summaries.items())
    return (
        "usage: miles COMMAND [options]\n\n"
        "A plugin-based reinforcement-learning loop for language models.\n\n"
        f"commands:\n{commands}\n\n"
        "miles COMMAND --help shows the options of a command; miles --version shows the version.\n"
        f"{DEBUG}=1 shows the traceback of an error."
    )


def _explain_unknown(name: str, commands: Mapping[str, object]) -> str:
    from miles_core.nearest import find_nearest

    if name.startswith("-"):
        return f"unknown option {name}: a command comes first, e.g. miles train {name}"
    close = find_nearest(name, commands)
    hint = f"did you mean miles {close[0]}?" if close else f"commands are {', '.join(commands)}"
    return f"unknown command {name!r}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
