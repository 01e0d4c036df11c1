"""What holds for every test of core, plugins and examples."""

import types

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_collection_a_run():
    """A run collects garbage once when its models are built. In a process with every module of every test imported that takes longer
    than a toy run, and a toy run is made a thousand times."""
    from miles_core.run import parts

    kept = parts.gc
    parts.gc = types.SimpleNamespace(collect=int, freeze=int, unfreeze=int)
    yield
    parts.gc = kept
