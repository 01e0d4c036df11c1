"""Tokens grouped by the variant of the model that computes them."""

from __future__ import annotations

import pytest
import torch

from miles_embedded.model.variants import TokenVariants

SPREADS = {
    "even": [0, 1, 2, 0, 1, 2],
    "one has most": [2] * 13 + [0],
    "one is absent": [0, 2, 2, 0, 2],
    "only the last": [2],
    "in runs": [0] * 5 + [1] * 2 + [2] * 9,
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("spread", SPREADS)
def test_products_per_entry_are_those_of_each_token(spread, static):
    index = torch.tensor(SPREADS[spread])
    tokens, parts = torch.randn(len(index), 4), torch.randn(3, 4, 5)
    grouped = TokenVariants(index, 3, static=static)
    found = grouped.join(torch.bmm(grouped.split(tokens), grouped.select(parts)))
    torch.testing.assert_close(found, torch.bmm(tokens[:, None], parts[index])[:, 0])


@pytest.mark.parametrize("spread", SPREADS)
def test_at_most_about_half_of_the_places_are_padding(spread):
    index = torch.tensor(SPREADS[spread])
    entries, size, _ = TokenVariants(index, 3).split(torch.zeros(len(index), 1)).shape
    assert entries * size < 2 * len(index) + 3


def test_one_entry_per_variant_in_order_selects_nothing():
    parts = torch.randn(3, 2)
    assert TokenVariants(torch.tensor([1, 0, 2]), 3).select(parts) is parts


def test_static_groups_have_one_shape_for_all_spreads():
    shapes = {
        TokenVariants(torch.tensor(index), 3, static=True).split(torch.zeros(6, 2)).shape
        for index in ([0] * 6, [2] * 6, [0, 1, 2] * 2, [0, 0, 0, 0, 0, 1])
    }
    assert len(shapes) == 1


def test_values_that_are_not_finite_stay_with_their_variant():
    index, parts = torch.tensor([0, 1, 0, 1, 1]), torch.ones(2, 3, 3)
    parts[1] = torch.nan
    grouped = TokenVariants(index, 2)
    found = grouped.join(torch.bmm(grouped.split(torch.ones(5, 3)), grouped.select(parts)))
    assert found.isnan().all(1).tolist() == [False, True, False, True, True]
