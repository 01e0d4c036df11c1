import random

import numpy as np
import torch

from miles_core.checkpoint.rng import get_rng, put_rng
from miles_core.checkpoint.store import Store


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()


def test_random_numbers_continue_where_they_were(tmp_path):
    draw()  # leaves a cached Gaussian in both Python's and NumPy's generator
    put_rng(Store(tmp_path))
    expected = draw()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    get_rng(Store(tmp_path))
    assert draw() == expected
