import math

import pytest

from miles_core.plugin.hint import Remedy, above, below, detect_fall, detect_jump, not_finite


@pytest.mark.parametrize(
    ("behaviour", "no", "yes"),
    [
        (not_finite(), [1.0, 2.0], [1.0, math.nan]),
        (above(1.0, 2), [3.0], [0.0, 1.5, 1.5]),
        (below(1.0, 2), [0.0, 3.0], [5.0, 0.5, 0.5]),
        (detect_jump(10, 3), [1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 11.0]),
        (detect_jump(10, 3, least=2.0), [0.0, 0.0, 0.0, 1.9], [0.0, 0.0, 0.0, 2.1]),
        (detect_jump(10, 3), [11.0], [-1.0, -1.0, -1.0, 11.0]),
        (detect_fall(0.5, 2), [1.0, 1.0, 0.6, 0.6], [1.0, 1.0, 0.4, 0.4]),
    ],
)
def test_behaviours(behaviour, no, yes):
    assert not behaviour(no)
    assert behaviour(yes)


def test_a_remedy_is_against_a_trouble_that_core_knows():
    with pytest.raises(ValueError, match=r"no trouble 'mismash'.* mismatch, instability"):
        Remedy("mismash", "")
