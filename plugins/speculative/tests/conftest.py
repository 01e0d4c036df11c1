"""A tiny checkpoint with an MTP layer, of any family."""

import pytest

from miles_core.testing.tiny import tiny_checkpoint
from miles_core.testing.toy import toy_files
from miles_speculative.checkpoint import with_mtp


@pytest.fixture(scope="session")
def mtp_checkpoint(tmp_path_factory):
    made = {}

    def make(family="qwen3_moe", **changes):
        key = (family, tuple(sorted(changes.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            tiny_checkpoint(family, directory / "plain", **changes)
            made[key] = with_mtp(directory / "plain", directory / "model")
        return made[key]

    return make


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory):
    """The toy run's model with an MTP layer, by family."""
    made = {}

    def make(family="qwen3_moe"):
        if family not in made:
            made[family] = with_mtp(toy_files(family) / "model", tmp_path_factory.mktemp("toy") / family)
        return made[family]

    return make
