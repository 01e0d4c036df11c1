"""When weights are checked, and the message about one that is not finite."""

import pytest
import torch

from miles_core.errors import MilesError
from miles_formats.finite import TOGETHER, Finite


class OnAGpu(torch.Tensor):
    """Says that it lies there."""

    is_cuda = True
    device = torch.device("cuda", 0)


class OnAnother(OnAGpu):
    device = torch.device("cuda", 1)


def weights(count, bad=None, value=float("inf")):
    found = torch.zeros(count, 4, 4)
    if bad is not None:
        found[bad, 2, 3] = value
    return found.as_subclass(OnAGpu)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_those_of_a_gpu_that_stay_are_looked_at_together(value):
    finite = Finite()
    for i, weight in enumerate(weights(3, 1, value)):
        finite.add(f"w{i}", weight, stays=True)
    with pytest.raises(
        MilesError, match=rf"w1 holds 1 values .* first \({value}\) at \[2, 3\]; it cannot be quantised"
    ):
        finite.look()
    finite.look()  # nothing waits


def test_many_do_not_wait_for_the_end():
    finite = Finite()
    with pytest.raises(MilesError, match="w0 holds"):
        for i, weight in enumerate(weights(TOGETHER, 0)):
            finite.add(f"w{i}", weight, stays=True)
    assert i == TOGETHER - 1


def test_those_of_another_gpu_are_looked_at_apart():
    finite = Finite()
    first, second = weights(2, 0)
    finite.add("w0", first, stays=True)
    with pytest.raises(MilesError, match="w0 holds"):
        finite.add("w1", second.as_subclass(OnAnother), stays=True)


def test_stacks_are_looked_at_together_and_the_weight_is_named():
    finite, stack = Finite(), weights(3)
    last = torch.full((2, 2, 2), float("nan")).as_subclass(OnAGpu)
    finite.add_stacks([])
    finite.add_stacks([(["a", "b", "c"], stack, stack[:, :1]), (["d", "e"], last, last)])
    with pytest.raises(MilesError, match="d holds 4 values"):
        finite.look()


def test_what_changes_is_looked_at_with_the_others_and_named():
    finite = Finite()
    one, two, three = weights(3, 1)
    finite.add("one", one)
    finite.add("two", two)
    finite.add("three", three, stays=True)
    with pytest.raises(MilesError, match="two holds values that are NaN or Inf; it cannot"):
        finite.look()
    finite.add_all(["one", "two", "three"], [one, two, three], False, [one, two, three])
    with pytest.raises(
        MilesError, match="one of 3 weights from one to three holds values that are NaN or Inf; it cannot"
    ):
        finite.look()


def test_what_a_cpu_holds_is_looked_at_at_once():
    (first,) = weights(1, 0)
    with pytest.raises(MilesError, match=r"w holds 1 values .* at \[2, 3\]"):
        Finite().add("w", first.as_subclass(torch.Tensor))
    Finite().add("w", torch.empty(0, 4))
