import pytest

from miles_tools.rewards.math_worker import judge


@pytest.mark.parametrize(
    ("label", "response", "verdict"),
    [
        (r"\frac{1}{2}", "$0.5$", {"readable": True, "equal": True}),
        (r"\boxed{3}", "so it is 3", {"readable": True, "equal": True}),
        ("3", "so it is 4", {"readable": True, "equal": False}),
        ("3", "", {"readable": True, "equal": False}),
        ("?!", "3", {"readable": False, "equal": False}),
    ],
)
def test_judge(label, response, verdict):
    assert judge(label, response) == verdict
