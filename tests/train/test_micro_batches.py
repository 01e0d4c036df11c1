from __future__ import annotations

import pytest

from miles_core.config.load import load
from miles_core.trainer import MICRO_BATCH_TOKENS, micro_batch_limits

TOKENS = MICRO_BATCH_TOKENS["cpu"]


@pytest.mark.parametrize(
    ("argv", "limits"),
    [
        ([], (None, TOKENS)),
        (["--use-dynamic-batch-size"], (None, TOKENS)),
        (["--max-tokens-per-gpu", "99"], (None, 99)),
        (["--micro-batch-size", "3"], (3, None)),
        (["--micro-batch-size", "3", "--use-dynamic-batch-size"], (None, TOKENS)),
        (["--micro-batch-size", "3", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "99"], (None, 99)),
    ],
)
def test_samples_are_counted_only_where_that_was_asked(argv, limits):
    assert micro_batch_limits(load(argv), "cpu") == limits


def test_a_gpu_takes_more():
    assert micro_batch_limits(load([]), "cuda") == (None, MICRO_BATCH_TOKENS["cuda"]) != (None, TOKENS)
