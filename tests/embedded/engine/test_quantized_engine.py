"""The embedded engine takes weights of every installed format, in place, twice over."""

import pytest

from miles_core.config.load import load
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model
from miles_formats.convert.installed import format_class, providers
from miles_testing.quantized_engine_contract import QuantizedEngineContract
from miles_testing.tiny import tiny_tokenizer


class Embedded(QuantizedEngineContract):
    name: str

    def format(self):
        return format_class(self.name).from_config(load(["--rollout-precision", self.name]))

    async def make(self, checkpoint, limits, codec):
        made = Settings(
            tiny_tokenizer().decode,
            eos=[1],
            seed=limits.seed,
            max_running_requests=limits.max_running_requests,
            max_context=limits.max_context,
            codec=codec,
        )
        return EmbeddedEngine(load_model(checkpoint, "float32"), made)


for _name in sorted(providers()):
    globals()[f"Test{_name.capitalize()}"] = type(f"Test{_name.capitalize()}", (Embedded,), {"name": _name})


def test_an_engine_that_keeps_old_weights_does_not_pass():
    class Stale(Embedded):
        name = "fp8"

        async def make(self, checkpoint, limits, codec):
            engine = await super().make(checkpoint, limits, codec)
            update = engine.update_weights

            async def first_only(units, version):
                if engine.version < 1:
                    await update(units, version)

            engine.update_weights = first_only
            return engine

    import asyncio
    import tempfile
    from pathlib import Path

    from miles_formats.codec import FormatCodec
    from miles_testing.quantized_engine_contract import couple_units
    from miles_testing.tiny import tiny_checkpoint

    suite = Stale()
    root, codec = Path(tempfile.mkdtemp()), FormatCodec(suite.format())
    paths = [tiny_checkpoint(suite.family, root / str(seed), seed, **suite.sizes) for seed in range(3)]
    encoded = paths[0], [list(codec.encode(couple_units(path))) for path in paths]
    with asyncio.Runner() as runner, pytest.raises(AssertionError):
        suite.test_two_updates_in_place_equal_a_fresh_load(runner, encoded)
