"""The embedded engine as one that keeps weights of its own and takes messages."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from miles_core.plugin import SyncError
from miles_embedded.engine.detokenizer import Detokenizer
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model
from miles_testing import tiny_checkpoint, tiny_tokenizer
from miles_zero_copy import segment


class Elsewhere(EmbeddedEngine):
    """Spoken to by messages. ``spoil(message, number)`` sees each of them first, ``received`` is their memory's kinds, ``most`` how many
    of them it was taking at a time."""

    capabilities = EmbeddedEngine.capabilities - {"shared_storage"}

    def __init__(self, *args):
        super().__init__(*args)
        self.received, self.spoil = [], None
        self.taking = self.most = 0

    async def receive(self, message, version, last):
        await asyncio.sleep(0)
        self.received.append(message["memory"]["kind"] if "memory" in message else "none")
        if self.spoil is not None:
            message = self.spoil(message, len(self.received))
        self.taking += 1
        self.most = max(self.most, self.taking)
        try:
            await super().receive(message, version, last)
        finally:
            self.taking -= 1


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    return [tiny_checkpoint("qwen3_moe", root / str(seed), seed) for seed in range(2)]


@pytest.fixture
def engine(checkpoints):
    return Elsewhere(load_model(checkpoints[0]), Settings(Detokenizer(tiny_tokenizer()), eos=[1]))


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch):
    """A folder of shared memory of a test's own, in which it leaves nothing."""
    with tempfile.TemporaryDirectory(dir=segment.DIRECTORY) as name:
        monkeypatch.setattr(segment, "DIRECTORY", Path(name))
        yield Path(name)
        assert not list(Path(name).iterdir())


@pytest.fixture
def unreachable():
    """What an engine on another host answers."""

    def spoil(message, number):
        if message["memory"]["kind"] == "file":
            raise SyncError("the two are on different hosts")
        return message

    return spoil
