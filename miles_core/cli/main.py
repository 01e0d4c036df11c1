"""``miles``: picks the subcommand, and turns errors into sentences and exit codes.

Exit codes: 0 done, 1 a defect (with its traceback), 2 a user's mistake (one message on stderr), 130 interrupted (143 by SIGTERM, 129 by
SIGHUP). ``train`` is core's command; installed plugins add others in their manifests (``Plugin.commands``). A command is
imported only when it is called.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence

from miles_core.cli.commands import Commands
from miles_core.errors import MilesError
from miles_core.redact import redact
from miles_core.version import __version__

DEBUG = "MILES_DEBUG"
#: What is wrong with a path and not with the program.
_PATHS = {getattr(errno, name) for name in ("ENAMETOOLONG", "ELOOP", "EISDIR", "ENOTDIR", "EROFS", "EACCES", "EPERM")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe left (miles train --help | head); nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MilesError as error:
        if os.environ.get(DEBUG, "0") not in ("", "0"):
            raise
        message = redact(str(error))
        print(message if message.startswith("error:") else f"error: {message}", file=sys.stderr)
        return _told(error)
    except OSError as error:
        said = _of_path(error)
        if not said or os.environ.get(DEBUG, "0") not in ("", "0"):
            raise  # a defect
        print(f"error: {said}", file=sys.stderr)
        return _told(error)


def _of_path(error: OSError) -> str:
    """What an error says about a disk or a path that a user gave; empty where it is about something else."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f": {error.filename}" if error.filename else ""
        return f"the disk is full{where} ({error.strerror}); free space there"
    return f"{error.filename}: {error.strerror}; check that path" if error.errno in _PATHS and error.filename else ""


def _told(error: BaseException) -> int:
    """What belongs behind an error's sentence; the exit code of a user's mistake."""
    for note in getattr(error, "__notes__", ()):
        print(redact(str(note)), file=sys.stderr)
    return 2


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, rest = words[0], words[1:]
    if name in ("--version", "-V"):
        print(f"miles-core {__version__}")
        return 0
    commands = Commands.installed()
    if name not in commands:
        raise MilesError(_unknown(name, commands))
    run: Callable[[list[str]], int] = commands.load(name)
    return run(rest)


def _help() -> str:
    summaries = Commands.installed().summaries
    width = max(map(len, summaries))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in summaries.items())
    return (
        "usage: miles COMMAND [options]\n\n"
        "A plugin-based reinforcement-learning loop for language models.\n\n"
        f"commands:\n{commands}\n\n"
        "miles COMMAND --help shows a command's options; miles --version the version.\n"
        f"{DEBUG}=1 shows the traceback behind an error message."
    )


def _unknown(name: str, commands: Commands) -> str:
    from miles_core.nearest import nearest

    if name.startswith("-"):
        return f"unknown option {name}: a command comes first, e.g. miles train {name}"
    close = nearest(name, commands)
    hint = f"did you mean miles {close[0]}?" if close else f"commands are {', '.join(commands)}"
    return f"unknown command {name!r}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
