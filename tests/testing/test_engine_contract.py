"""The engine contract, on the embedded engine and on one in another process."""

from __future__ import annotations

from miles_embedded.engine.detokenizer import Detokenizer
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model
from miles_embedded.testing.process_engine import ProcessEngine
from miles_embedded.testing.routes import ROUTES, record_routes
from miles_testing.engine_contract import EngineContract
from miles_testing.tiny import tiny_tokenizer


class TestEmbeddedEngine(EngineContract):
    extra = ROUTES

    async def make(self, checkpoint, limits):
        model = load_model(checkpoint)
        record_routes(model)
        return EmbeddedEngine(model, Settings(Detokenizer(tiny_tokenizer()), eos=[1], **vars(limits)))


class TestSinksAndWindows(TestEmbeddedEngine):
    family = "gpt_oss"


class TestIndexer(TestEmbeddedEngine):
    family = "deepseek_v32"


class TestProcessEngine(EngineContract):
    extra = ROUTES

    async def make(self, checkpoint, limits):
        return ProcessEngine(checkpoint, **vars(limits))
