"""What holds for every test of core, plugins and examples."""

import logging
import os
import types
import zlib
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import settings

# the time of an example says nothing on a busy machine
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption("--slow-part", default="", help="K/N: also run part K of N (from 0) of tests/slow_tests.txt")


def pytest_collection_modifyitems(config, items):
    """Slow tests get the marker ``thorough``, except those of ``--slow-part``."""
    listed = {*Path(__file__).with_name("tests").joinpath("slow_tests.txt").read_text(encoding="utf-8").splitlines()}
    part, _, parts = config.getoption("--slow-part").partition("/")
    for item in items:
        known = item.nodeid in listed or item.nodeid.partition("[")[0] in listed
        if known and not (parts and zlib.crc32(item.nodeid.encode()) % int(parts) == int(part)):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(autouse=True)
def log_levels_as_before():
    """A run sets the levels of our loggers, which decide what a later test finds in ``caplog``."""
    yield
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("miles") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)


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
