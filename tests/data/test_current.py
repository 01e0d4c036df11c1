"""Which tokens the trained weights generated."""

from miles_core.data.current import current_tokens
from miles_core.data.sample import Sample


def test_tokens_of_the_trained_weights():
    mixed = Sample(tokens=[1, 2, 3, 4, 5], response_length=3, weight_versions=[(2, 6), (4, 7)])
    unknown = Sample(tokens=[1, 2], response_length=1)
    assert mixed.versions.tolist() == [6, 6, 7] and unknown.versions.tolist() == [-1]
    assert current_tokens([mixed, unknown], 7).tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert current_tokens([mixed], 6).tolist() == [0, 0, 1, 1, 0] and len(current_tokens([], 6)) == 0
