"""Servers of a tiny model."""

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from miles_core.config.command import Command
from miles_service.command import ModelThread
from miles_service.server import ServiceServer
from miles_service.testing import TOKEN, Client, base

WORDS = ("--lora-target-modules=all-linear", "--device=cpu", "--adam-eps=1e-2", "--lora-alpha=8")


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Start servers of the tiny model; a function of further options that returns the address and the directory."""
    started = []

    def start(*words, adapters=3, samplers=2, directory=None, checkpoint=None):
        directory = directory or tmp_path_factory.mktemp("serve") / "run"
        words = [f"--hf-checkpoint={checkpoint or base()}", f"--save={directory}", *WORDS, *words]
        ready = Future()
        models = ModelThread(words, Command(), adapters, samplers, ready, lambda: None)
        models.start()
        server = ServiceServer("127.0.0.1", 0, 1 << 20, TOKEN)
        loop = asyncio.new_event_loop()
        server.service = ready.result()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        started.append((models, server, loop))
        return SimpleNamespace(address=server.address, directory=directory, service=server.service, models=models)

    yield start
    for models, server, loop in started:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        models.stop()


@pytest.fixture(scope="module")
def server(serve):
    return serve()


@pytest.fixture
def client(server):
    made = Client(server.address)
    yield made
    status, _ = made.send(f"sessions/{made.session}/finish", {"reason": {"type": "success"}})
    assert status == 200
