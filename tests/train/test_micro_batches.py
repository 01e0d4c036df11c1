from __future__ import annotations

import pytest

from miles_core.config.load import load
from miles_core.train.micro_batches import TOKENS_ON_CPU, TOKENS_ON_GPU, micro_batch_limits


@pytest.mark.parametrize(
    ("argv", "limits"),
    [
        ([], (None, TOKENS_ON_CPU)),
        (["--use-dynamic-batch-size"], (None, TOKENS_ON_CPU)),
        (["--max-tokens-per-gpu", "99"], (None, 99)),
        (["--micro-batch-size", "3"], (3, None)),
        (["--micro-batch-size", "3", "--use-dynamic-batch-size"], (None, TOKENS_ON_CPU)),
        (["--micro-batch-size", "3", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "99"], (None, 99)),
    ],
)
def test_samples_are_counted_only_where_that_was_asked(argv, limits):
    assert micro_batch_limits(load(argv), on_gpu=False) == limits


def test_a_gpu_takes_more():
    assert micro_batch_limits(load([]), on_gpu=True) == (None, TOKENS_ON_GPU)
