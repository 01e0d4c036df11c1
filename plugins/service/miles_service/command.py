"""``miles serve``: offers a base model to clients that train adapters of it over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from miles_core.config.command import Command, CommandParser
from miles_core.plugin import ConfigError
from miles_service.adapters import Adapters
from miles_service.paths import SavedWeights, delete_unnamed
from miles_service.queue import FairQueue
from miles_service.server import ServiceServer
from miles_service.service import Service

#: Environment variable with the token of clients; a random one is made without it.
TOKEN = "MILES_SERVE_TOKEN"
#: Options of the run that the service needs.
BEFORE = ("--plugins=lora", "--lora-sync=adapter")
#: Facts of the plan that the service needs -> the value and the reason.
NEEDS = {
    "engine": ("embedded", "all models share the weights of one base, in one process"),
    "trainer": ("embedded", "all models share the weights of one base, in one process"),
    "runtime": ("inline", "models are created while the service runs"),
    "colocate": (False, "models train and generate at the same time"),
    "lora.sync": ("adapter", "all models share the weights of one base"),
    "rollout.temperature": (
        1.0,
        "losses refer to the model's own distribution; clients choose the temperature of each sample",
    ),
    "train.optimizer": ("adamw", "clients set the coefficients of AdamW"),
}
#: Requests of samplers that run together; the engine batches their responses.
MOST_SAMPLES = 256
USAGE = "miles serve --hf-checkpoint DIR [--port N] [--max-adapters N] [any option of miles train]"
DESCRIPTION = (
    "Serve a base model to clients that train adapters of it: the wire format is that of the Python package tinker. Rewards, data and the loop "
    "are the clients'. Prints the address and the token; the environment variable " + TOKEN + " sets the token."
)


def run(argv: Sequence[str]) -> int:
    """Run the command until a signal stops it."""
    parser = CommandParser("serve", usage=USAGE, description=DESCRIPTION)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: 8000)")
    parser.add_argument(
        "--max-adapters",
        type=positive,
        default=8,
        metavar="N",
        help="adapters that exist at the same time (default: 8)",
    )
    parser.add_argument(
        "--samplers",
        type=positive,
        default=2,
        metavar="N",
        help="versions of weights that generate at the same time (default: 2)",
    )
    parser.add_argument(
        "--max-body", type=int, default=32 << 20, metavar="BYTES", help="bytes of a request (default: 32 MiB)"
    )
    options, rest, command = parser.parse_own(argv)
    token = os.environ.get(TOKEN) or f"tml-{secrets.token_urlsafe(32)}"
    if not token.startswith("tml-"):
        raise ConfigError(f"{TOKEN} must begin with tml-, because clients refuse other tokens")
    server = ServiceServer(options.host, options.port, options.max_body, token)
    asyncio.run(serve(server, rest, options.max_adapters, options.samplers, command))
    return 0


def positive(text: str) -> int:
    """Convert an argument to a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


async def serve(server: ServiceServer, words: list[str], most: int, samplers: int, command: Command) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        server: the server, not started.
        words: options of ``miles train``.
        most, samplers: numbers of adapters and samplers.
        command: the command of these options, for error messages.
    """
    stop, ready = asyncio.Event(), Future[Service]()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    loop = asyncio.get_running_loop()
    thread = ModelThread(words, command, most, samplers, ready, lambda: loop.call_soon_threadsafe(stop.set))
    thread.start()
    try:
        server.service = await asyncio.wrap_future(ready)
        await server.start()
        print(f"serving {server.service.base}; clients need:")
        for name, value in (("TINKER_BASE_URL", server.address), ("TINKER_API_KEY", server.token)):
            print(f"  export {name}={value}", flush=True)
        await stop.wait()
    finally:
        await server.stop()
        await asyncio.to_thread(thread.stop)


class ModelThread(threading.Thread):
    """The thread that owns the models and runs the queue.

    Args:
        words, command, most, samplers: see ``serve``.
        ready: receives the service, or the error that prevented it.
        ended: called at the end.
    """

    def __init__(
        self,
        words: list[str],
        command: Command,
        most: int,
        samplers: int,
        ready: Future[Service],
        ended: Callable[[], object],
    ) -> None:
        super().__init__(name="models")
        self.words, self.command, self.most, self.samplers = words, command, most, samplers
        self.ready, self.ended = ready, ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Run until ``stop``."""
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)
        finally:
            self.ended()

    def stop(self) -> None:
        """Cancel what runs, release the models and wait for the thread."""
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop is closed: the thread has ended
                self._loop.call_soon_threadsafe(self._task.cancel)
        self.join()

    async def _main(self) -> None:
        from miles_core.config.load import load
        from miles_core.observe import log as logs
        from miles_core.primitives import open_requested

        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        requested = load(self.words, command=replace(self.command, before=BEFORE))
        if requested.model.hf_checkpoint is None:
            raise ConfigError("miles serve needs --hf-checkpoint DIR, the base model")
        base = requested.model.hf_checkpoint
        logs.configure(requested.run.log_level if requested.is_set("log_level") else "warning")
        async with open_requested(requested) as run:
            for name, (value, reason) in NEEDS.items():
                if (found := run.run.plan.fact(name)) != value:
                    raise ConfigError(f"miles serve needs {name} = {value} and not {found}: {reason}")
            delete_unnamed(run.run.directory)
            context, queue = run.run.plan.fact("model.context"), FairQueue(MOST_SAMPLES)
            adapters, saved = Adapters(run, self.most, self.samplers), SavedWeights(run.run.directory)
            self.ready.set_result(
                Service(base, int(context) if context else None, adapters, saved, queue, asyncio.get_running_loop())
            )
            await queue.run()
