from pathlib import Path

import pytest

from miles_embedded import load_model
from miles_testing.tiny import tiny_checkpoint


@pytest.fixture
def checkpoint_of(tmp_path):
    """``checkpoint_of(family)``: a tiny checkpoint."""
    return lambda family, **changes: Path(tiny_checkpoint(family, tmp_path / family, **changes))


@pytest.fixture
def model_of(checkpoint_of):
    return lambda family, **changes: load_model(checkpoint_of(family, **changes), "float32")
