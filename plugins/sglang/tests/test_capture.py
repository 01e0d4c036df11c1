"""Which CUDA graphs SGLang captures if the user does not choose them."""

import pytest

from miles_sglang.capture import batch_sizes, graph_arguments


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, [1]),
        (8, [1, 2, 4, 8]),
        (100, [1, 2, 4, 8, 16, 32, 48, 64, 100]),
        (256, [1, 2, 4, 8, 16, 32, 48, 64, 128, 192, 256]),
        (600, [1, 2, 4, 8, 16, 32, 48, 64, 128, 192, 256, 384, 512, 600]),
    ],
)
def test_few_sizes_up_to_the_largest_batch_are_captured(largest: int, sizes: list[int]) -> None:
    assert batch_sizes(largest) == sizes


def test_prompts_are_not_captured_and_the_largest_batch_is_bounded() -> None:
    found = graph_arguments({}, 1024)
    assert found == {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": batch_sizes(256)}
    assert graph_arguments({"cuda_graph_max_bs_decode": 512}, 1024)["cuda_graph_bs_decode"][-1] == 512
    assert graph_arguments({"cuda_graph_max_bs_decode": 512}, 40)["cuda_graph_bs_decode"][-1] == 40


@pytest.mark.parametrize(
    ("argument", "left"),
    [
        ({"cuda_graph_bs_decode": [8]}, {"disable_prefill_cuda_graph"}),
        ({"speculative_algorithm": "EAGLE"}, {"disable_prefill_cuda_graph"}),
        ({"cuda_graph_bs_prefill": [8]}, {"cuda_graph_bs_decode"}),
        ({"cuda_graph_config": {"decode": {}}}, set()),
    ],
)
def test_what_the_user_chooses_stays(argument: dict[str, object], left: set[str]) -> None:
    assert set(graph_arguments(argument, 64)) == left
