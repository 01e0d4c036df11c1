import copy
import pickle

import numpy as np
import pytest

from miles_core.data import Sample
from miles_core.data.column import FLOATS, MASK, TOKENS, Column, as_column, join_columns


def test_a_column_behaves_like_a_list():
    column = Column(TOKENS, [3, 1, 2])
    same, zero, four = [3, 1, 2], [0], [4]
    assert column == same and same == column and column == tuple(same) and column != same[:2] and column != "abc"
    assert column[1:] == [1, 2] and isinstance(column[1:], Column) and column[-1] == 2 and type(column[0]) is int
    assert column + four == [3, 1, 2, 4] and zero + column == [0, 3, 1, 2] and column + tuple(four) == column + four
    assert column == Column(FLOATS, [3.0, 1.0, 2.0]) and repr(column) == "[3, 1, 2]" and not Column(MASK)
    column += [7]
    column.append(8)
    assert column == [3, 1, 2, 7, 8] and next(reversed(column)) == 8 and column.index(7) == 3
    assert join_columns([column, column[:1]]) == [3, 1, 2, 7, 8, 3]
    with pytest.raises(TypeError):
        hash(column)


@pytest.mark.parametrize("remake", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c, 5))])
def test_copies_are_columns_of_their_own(remake):
    column = Column(FLOATS, [-0.1, 0.0])
    made = remake(column)
    made.append(1.0)
    assert type(made) is Column and made == [-0.1, 0.0, 1.0] and column == [-0.1, 0.0]


def test_numpy_reads_a_column_without_a_copy():
    for typecode, dtype in ((TOKENS, np.int32), (FLOATS, np.float64), (MASK, np.int8)):
        column = Column(typecode, [1, 0])
        view = np.asarray(column)
        assert view.dtype == dtype
        view[0] = 0
        assert column == [0, 0]
        assert Column.of(np.array([1, 0]), typecode) == [1, 0]
    with pytest.raises(BufferError):
        column.append(1)  # a view exists


@pytest.mark.parametrize(
    "values", [None, "12", [1.5], ["a"], [1 << 40], {1, 2}, np.zeros((2, 2), np.int64), np.zeros(2)]
)
def test_what_is_no_column_is_left_for_its_owner_to_describe(values):
    assert as_column(values, TOKENS) is values


def test_a_sample_converts_what_is_assigned():
    sample = Sample(tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-0.1, -0.2])
    assert type(sample.tokens) is Column and type(sample.rollout_log_probs) is Column and sample.mask == [1, 1]
    sample.loss_mask = [0, 1]
    assert type(sample.mask) is Column and sample.mask == [0, 1]
    sample.tokens = np.array([4, 5, 6])
    assert sample.tokens == [4, 5, 6] and type(sample.tokens) is Column
    sample.remove_sample = True
    assert sample.mask == [0, 0]
    assert Sample.from_dict({"tokens": (4, 5), "weight_versions": [[0, 1]]}).tokens == [4, 5]
