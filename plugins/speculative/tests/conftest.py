"""A tiny checkpoint with an MTP layer, of any family."""

import pytest

from miles_speculative.checkpoint import with_mtp
from miles_testing.tiny import tiny_checkpoint
from miles_testing.toy import toy_files


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

    def make(family="qwen3_moe", window=False):
        if (family, window) not in made:
            sizes = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0} if window else {}
            target = tmp_path_factory.mktemp("toy") / family
            made[family, window] = with_mtp(toy_files(family, **sizes) / "model", target)
        return made[family, window]

    return make
