"""The plan says when the engine leaves the fast way to decode, and why."""

import pytest

from miles_testing import plan


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ""),
        ({"rollout_top_p": 0.9}, "top-k and top-p wait for the logits"),
        ({"rollout_top_k": 5}, "top-k and top-p wait for the logits"),
        ({"rollout_stop": "</x>"}, "reads the text of every new token"),
        ({"rollout_stop": "</x>", "embedded_disable_cuda_graph": True}, ""),
    ],
)
def test_a_plan_for_a_gpu_says_what_decodes_slowly(options, found):
    notes = [note for note in plan(facts=["gpu=H200"], **options).advice if "decoding is slower" in note]
    assert [found in note for note in notes] == [True] * bool(found)
    assert not [note for note in plan(facts=["gpu=none"], **options).advice if "decoding is slower" in note]
