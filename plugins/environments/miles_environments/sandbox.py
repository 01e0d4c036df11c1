"""Sandboxes: run a program that a model wrote, with limits.

``LocalSandbox`` limits the time, memory and output of a subprocess in an empty directory, without the run's environment variables; it isolates
neither the network nor the file system. ``DockerSandbox`` runs a container for each program, without a network. A third party's class is
selected by ``--sandbox module:Class``; it is made with the plugin's options.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from miles_core.plugin import ConfigError
from miles_environments.config import EnvironmentsConfig
from miles_environments.environment import EnvironmentFault

#: Bytes of a program's output that are kept; it may write more.
OUTPUT = 1 << 20
#: Largest file that a program may write, in bytes.
FILE = 64 << 20
#: Sets the limits of its process and executes the program. Arguments: CPU seconds, bytes of memory and of a file, then the command.
_LAUNCH = (
    "import os, resource as r, sys\n"
    "s, m, f = map(int, sys.argv[1:4])\n"
    "for k, v in ((r.RLIMIT_CPU, s), (r.RLIMIT_AS, m), (r.RLIMIT_FSIZE, f), (r.RLIMIT_CORE, 0)): r.setrlimit(k, (v, v))\n"
    "os.execvp(sys.argv[4], sys.argv[4:])\n"
)


@dataclass(frozen=True)
class Finished:
    """A program that ended.

    Attributes:
        output: what it wrote to standard output and standard error, in order, at most ``OUTPUT`` bytes.
        code: its exit code; negative for a signal.
        timed_out: whether it was ended because it took too long.
    """

    output: str
    code: int
    timed_out: bool


class Sandbox(ABC):
    """Runs programs.

    Args:
        options: the plugin's options, with the limits.
    """

    #: The program that runs Python files.
    python: str = "python3"

    def __init__(self, options: EnvironmentsConfig) -> None:
        self.options = options

    @abstractmethod
    async def run(self, command: Sequence[str], files: Mapping[str, str] | None = None) -> Finished:
        """Run a command in a new directory with ``files`` (name -> text), and remove the directory.

        Raises:
            EnvironmentFault: the sandbox itself failed.
        """


class LocalSandbox(Sandbox):
    """Subprocesses of this machine."""

    python = sys.executable

    async def run(self, command: Sequence[str], files: Mapping[str, str] | None = None) -> Finished:
        with tempfile.TemporaryDirectory(prefix="miles-sandbox-", ignore_cleanup_errors=True) as directory:
            write_files(Path(directory), files or {})
            seconds, memory = self.options.sandbox_seconds, self.options.sandbox_memory_mb << 20
            limits = [str(int(seconds) + 1), str(memory), str(FILE)]
            environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": directory, "LANG": "C.UTF-8"}
            return await _run(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, *limits, *command], seconds, directory, environment
            )


class DockerSandbox(Sandbox):
    """One container per program, by Docker's command line.

    Raises:
        ConfigError: Docker is not installed, or its service does not answer.
    """

    def __init__(self, options: EnvironmentsConfig) -> None:
        super().__init__(options)
        if shutil.which("docker") is None:
            raise ConfigError(
                "--sandbox docker: the program docker is not installed; install Docker, or give --sandbox local"
            )
        try:
            found = subprocess.run(["docker", "version"], capture_output=True, text=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                "--sandbox docker: docker version did not answer within 30 seconds; is its service running?"
            ) from None
        if found.returncode:
            last = (found.stderr or found.stdout).strip().splitlines()[-1:] or ["no output"]
            raise ConfigError(
                f"--sandbox docker: docker version failed ({last[0]}); start Docker's service, or give --sandbox local"
            )

    async def run(self, command: Sequence[str], files: Mapping[str, str] | None = None) -> Finished:
        name = f"miles-{secrets.token_hex(8)}"
        options = self.options
        with tempfile.TemporaryDirectory(prefix="miles-sandbox-", ignore_cleanup_errors=True) as directory:
            write_files(Path(directory), files or {})
            os.chmod(directory, 0o777)  # the container's user is another one
            limits = [
                f"--memory={options.sandbox_memory_mb}m",
                "--cpus=1",
                "--pids-limit=128",
                f"--network={options.sandbox_network}",
            ]
            safety = ["--cap-drop=ALL", "--security-opt=no-new-privileges"]
            whole = ["docker", "run", "--rm", f"--name={name}", *limits, *safety, f"--volume={directory}:/sandbox"]
            whole += ["--workdir=/sandbox", options.sandbox_image, *command]
            done = await _run(whole, options.sandbox_seconds, directory, dict(os.environ))
            if done.timed_out:  # the client has ended, not the container
                await _run(["docker", "kill", name], 30, directory, dict(os.environ))
        if done.code == 125 and not done.timed_out:
            raise EnvironmentFault(f"docker cannot run {options.sandbox_image}: {done.output.strip()[-200:]}")
        return done


def make_sandbox(options: EnvironmentsConfig) -> Sandbox:
    """Make the sandbox of ``--sandbox``.

    Raises:
        ConfigError: there is no such sandbox, or it cannot work on this machine.
    """
    own: dict[str, type[Sandbox]] = {"local": LocalSandbox, "docker": DockerSandbox}
    if options.sandbox in own:
        return own[options.sandbox](options)
    module, separator, name = options.sandbox.rpartition(":")
    try:
        found = getattr(importlib.import_module(module), name, None) if separator else None
    except ImportError as error:
        raise ConfigError(f"--sandbox {options.sandbox}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Sandbox)):
        raise ConfigError(
            f"--sandbox {options.sandbox}: give local, docker, or module:Class of a miles_environments.sandbox.Sandbox"
        )
    return found(options)


def write_files(directory: Path, files: Mapping[str, str]) -> None:
    """Write the files of a program; names may not leave the directory.

    Raises:
        ValueError: a name is absolute or contains ``..``.
    """
    for name, text in files.items():
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"the file {name!r} is outside of the sandbox")
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text, encoding="utf-8", errors="surrogatepass")


async def _run(command: Sequence[str], seconds: float, directory: str, environment: Mapping[str, str]) -> Finished:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=directory,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentFault(f"a sandbox cannot start {command[0]}: {error.strerror}") from error
    kept, timed_out = bytearray(), False
    try:
        async with asyncio.timeout(seconds):
            await _read(process, kept)
            await process.wait()
    except TimeoutError:
        timed_out = True
    finally:  # also processes that the program left behind
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())
    return Finished(kept.decode(errors="replace"), int(process.returncode or 0), timed_out)


async def _read(process: asyncio.subprocess.Process, kept: bytearray) -> None:
    assert process.stdout is not None
    while chunk := await process.stdout.read(1 << 16):
        kept += chunk[: max(OUTPUT - len(kept), 0)]
