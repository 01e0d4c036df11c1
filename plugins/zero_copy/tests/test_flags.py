"""Flags of other software."""

import pytest

from miles_core.config.load import load
from miles_core.plugin import ConfigError
from miles_zero_copy import plugin


def test_flags_of_weight_differences_are_translated():
    given = "--update-weight-mode delta --delta-compression sparse_indices --delta-dtype fp32 --delta-full-interval 30"
    with pytest.raises(ConfigError) as error:
        load(given.split(), manifests=(plugin,))
    assert str(error.value).rstrip().endswith("--use-zero-copy-sync")
