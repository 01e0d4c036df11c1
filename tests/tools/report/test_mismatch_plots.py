"""The plots of the mismatch."""

import warnings

import pytest

from miles_tools.report.mismatch_plots import draw_budget


@pytest.mark.parametrize(
    "name", ["kernels and batching", "log-probs are normalised over the tokens that top-p 0.8 and top-k 50 keep " * 2]
)
def test_the_bars_of_a_cause_have_room_next_to_its_name(name):
    cause = {"name": name, "why": "", "share": 1.0, "abs_delta": 0.1, "corrected": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a layout without room
        assert draw_budget({"causes": [cause, {**cause, "name": "routing"}]}).startswith(b"\x89PNG")
