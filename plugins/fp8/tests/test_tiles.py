"""The rule of tiles of the product's kernel: what it chooses fits a multiprocessor of Hopper GPUs."""

from itertools import product

import pytest

from miles_fp8.layout import TILE

#: Bytes of shared memory of a multiprocessor.
SHARED = 228 * 1024
SIZES = [16, 128, 1024, 1536, 2048, 2560, 4096, 6144, 8192, 12288, 24576, 32768]


@pytest.fixture(scope="module", autouse=True)
def triton():
    return pytest.importorskip("triton")


@pytest.mark.parametrize("width", SIZES)
def test_a_choice_fits(width):
    from miles_fp8.product_kernels import MULTIPROCESSORS, TICKETS, blocks

    for rows, inner in product(range(1, 600), SIZES):
        block_rows, block_columns, splits, warps, stages = blocks(rows, width, inner)
        tiles = -(-rows // block_rows) * -(-width // block_columns)
        memory = stages * 2 * TILE * (block_rows + block_columns)  # a stage holds two blocks of codes
        assert warps in (4, 8) and memory <= SHARED
        assert splits == 1 or (tiles * splits <= TICKETS and splits <= -(-inner // TILE))
        if block_rows == 64 and tiles * splits <= MULTIPROCESSORS:
            assert 2 * memory > SHARED, "two programs may share a multiprocessor while others are idle"


@pytest.mark.parametrize(
    ("rows", "width", "inner", "ours"),
    [(64, 24576, 4096, True), (128, 8192, 1536, True), (192, 8192, 1536, False), (256, 4096, 4096, False)],
)
def test_many_rows_of_a_large_matrix_are_left_to_cublas(rows, width, inner, ours):
    from miles_fp8.product_kernels import takes

    assert takes(rows, width, inner) is ours
