"""The text that both sides score is longer than what a model changes at."""

import numpy as np
import pytest

from miles_core.mismatch.probe_text import BEHIND, FEWEST, MOST_ON_CPU, TOTAL, probe_text
from miles_core.plugin.boundaries import boundaries


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"sliding_window": 512}, {"sliding_window": 512}),
        (
            {"text_config": {"attention_chunk_size": 8192, "floor_scale": 8192}},
            {"attention_chunk_size": 8192, "floor_scale": 8192},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 4096}},
            {"original_max_position_embeddings": 4096},
        ),
        (
            {"rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 2048},
            {"max_position_embeddings": 2048},
        ),
        ({"sliding_window": None, "use_sliding_window": True, "max_position_embeddings": 99}, {}),
        ({"vision_config": {"window_size": 7}}, {}),
    ],
)
def test_boundaries_are_read_from_the_configuration(config, expected):
    assert boundaries(config) == expected


def test_the_long_sequence_crosses_every_boundary_that_it_can():
    made = probe_text({"sliding_window": 512, "floor_scale": 8192}, [], 1000, 100_000, on_cpu=True)
    assert len(made.sequences[0]) == 512 + BEHIND and made.beyond == {"floor_scale": 8192}
    assert len(probe_text({}, [], 1000, 100_000, on_cpu=True).sequences[0]) == FEWEST
    assert len(probe_text({"sliding_window": 4096}, [], 1000, 100_000, on_cpu=False).sequences[0]) == 4096 + BEHIND
    assert max(map(len, probe_text({"sliding_window": MOST_ON_CPU}, [], 99, 50, on_cpu=True).sequences)) == 50


def test_tokens_are_the_runs_prompts_and_ordinary_ids():
    made = probe_text({"eos_token_id": [1, 2], "image_token_id": 3}, [[7, 8], [9]], 12, 4096, on_cpu=True)
    assert made.sequences[0][:3] == [7, 8, 9]
    drawn = {token for sequence in made.sequences for token in sequence[3:]}
    assert drawn == set(range(12)) - {1, 2, 3}
    assert made == probe_text({"eos_token_id": [1, 2], "image_token_id": 3}, [[7, 8], [9]], 12, 4096, on_cpu=True)


def test_random_tokens_come_from_all_parts_of_the_vocabulary_and_are_enough_for_all_experts():
    made = probe_text({}, [], 150_000, 4096, on_cpu=True)
    tokens = np.sort([token for sequence in made.sequences for token in sequence])
    assert TOTAL <= len(tokens) < 2 * TOTAL and np.diff(tokens).max() < 2.1 * 150_000 / len(tokens)
    many = probe_text({}, [], 150_000, 4096, on_cpu=True, groups=128)
    assert sum(map(len, many.sequences)) >= 16 * 128
    assert probe_text({}, [], 150_000, 4096, on_cpu=True, attempt=1) != made
