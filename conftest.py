"""What holds for every test of core, plugins and examples."""

import os
import types
from importlib import metadata

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_collection_a_run():
    """A run collects garbage once when its models are built. In a process with every module of every test imported that takes longer
    than a toy run, and a toy run is made a thousand times."""
    from miles_core.run import parts

    kept = parts.gc
    parts.gc = types.SimpleNamespace(collect=int, freeze=int, unfreeze=int, set_threshold=int)
    yield
    parts.gc = kept


@pytest.fixture(autouse=True, scope="session")
def no_metadata_twice():
    """A plan reads the metadata of every plugin. The tests make thousands of plans; they read a file again when it has changed."""

    def remember(name, file):
        read, known = getattr(metadata.PathDistribution, name).__get__, {}

        def remembered(distribution):
            try:
                path = os.path.join(distribution._path, file)
                key = path, os.stat(path).st_mtime_ns
            except (OSError, TypeError):  # the file is missing, or in an archive
                return read(distribution)
            if key not in known:
                known[key] = read(distribution)
            return known[key]

        return property(remembered)

    with pytest.MonkeyPatch.context() as patch:
        for name, file in (("metadata", "METADATA"), ("entry_points", "entry_points.txt")):
            patch.setattr(metadata.PathDistribution, name, remember(name, file))
        yield
