"""Packing: each distinct token once, every trained position reachable, nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data.batch import collate
from miles_core.data.field import Field
from miles_core.data.sample import Sample
from miles_embedded.trainer.attention import Buckets
from miles_embedded.trainer.packing import pack, split

ROUTES = Field("routes", "int32", "token-1", pad=-1, shape=(2,))
NOTES = Field("notes", "float32", "response")
PICKS = Field("picks", "int32", "token", ragged=True)


@st.composite
def batches(draw):
    """Groups with a common prompt; siblings may have prompts of their own, masks may be empty."""
    samples = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 4))):
            mine = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)) if draw(st.integers(0, 4)) == 0 else prompt
            response = draw(st.lists(st.integers(0, 3), max_size=5))
            mask = draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response)))
            samples.append(
                Sample(
                    tokens=mine + response,
                    response_length=len(response),
                    loss_mask=mask,
                    group_index=group,
                    index=len(samples),
                    fields={
                        "routes": np.array(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)))[:, None].repeat(
                            2, 1
                        )
                    }
                    if (n := len(mine) + len(response) - 1) and draw(st.booleans())
                    else {},
                )
            )
    order = draw(st.permutations(range(len(samples))))
    return collate([samples[i] for i in order], [ROUTES])


def history(batch, flat):
    """The tokens and input columns a flat position depends on: its sample's up to itself."""
    start = int(batch.starts[int(batch.owner[flat])])
    columns = [batch.columns[n][start : flat + 1].tolist() for n in sorted(batch.inputs)]
    return batch.tokens[start : flat + 1].tolist(), columns


def seen_by(call, packing):
    """For each row, the rows it attends to in order, read off the buckets as attention reads them."""
    found = {}
    slots = call.slots.tolist()
    pads = set(call.pads.tolist())
    trunk_slots = [
        [range(b.slot + i * b.length, b.slot + (i + 1) * b.length) for i in range(len(b.segments))] for b in call.trunks
    ]
    for bucket in call.trunks:
        for i in range(len(bucket.segments)):
            run = list(range(bucket.slot + i * bucket.length, bucket.slot + (i + 1) * bucket.length))
            for j, slot in enumerate(run):
                if slot not in pads:
                    found[slots[slot]] = [slots[s] for s in run[: j + 1]]
    for bucket in call.branches:
        for i in range(len(bucket.segments)):
            run = list(range(bucket.slot + i * bucket.length, bucket.slot + (i + 1) * bucket.length))
            keys = [*trunk_slots[bucket.trunk_bucket][int(bucket.trunk[i])], *run]
            mask = bucket.mask[i if len(bucket.mask) > 1 else 0, 0]
            for j, slot in enumerate(run):
                if slot not in pads:
                    found[slots[slot]] = [slots[k] for k, seen in zip(keys, mask[j].tolist(), strict=True) if seen]
    return found


@settings(max_examples=150)
@given(batches(), st.booleans())
def test_every_row_sees_exactly_its_history(batch, share):
    packing = pack(batch, share)
    call = Buckets(packing)
    seen = seen_by(call, packing)
    assert sorted(seen) == list(range(len(packing.rows)))
    for row, flat in enumerate(packing.rows.tolist()):
        keys = packing.rows[seen[row]].tolist()
        tokens, columns = history(batch, flat)
        assert batch.tokens[keys].tolist() == tokens
        assert [batch.columns[n][keys].tolist() for n in sorted(batch.inputs)] == columns
        assert packing.positions[seen[row]].tolist() == list(range(len(tokens)))


@settings(max_examples=150)
@given(batches(), st.booleans())
def test_every_target_has_the_row_before_it(batch, share):
    packing = pack(batch, share)
    assert packing.targets.tolist() == batch.mask.nonzero().flatten().tolist()
    for target, source in zip(packing.targets.tolist(), packing.sources.tolist(), strict=True):
        assert history(batch, int(packing.rows[source])) == history(batch, target - 1)
    known = packing.row_of >= 0
    for flat in known.nonzero().flatten().tolist():
        assert history(batch, int(packing.rows[packing.row_of[flat]])) == history(batch, flat)


@settings(max_examples=100)
@given(batches(), st.integers(1, 40), st.booleans())
def test_a_split_deals_every_sample_once_within_the_limit(batch, limit, share):
    found = split(batch, max_tokens=limit, share=share)
    assert sorted(i for samples in found for i in samples) == list(range(len(batch)))
    for samples in found:
        rows = len(pack(batch.select(samples), share).rows)
        trained = [i for i in samples if batch.select([i]).mask.any()]
        assert rows <= limit or len(trained) <= 1


def sibling(response, prompt=(5, 6, 7), **fields):
    return Sample(tokens=[*prompt, *response], response_length=len(response), fields=fields)


def test_rows_are_one_prompt_and_the_responses_without_their_last_tokens():
    packing = pack(collate([sibling([1, 2]), sibling([3, 4, 5])]))
    assert packing.rows.tolist() == [0, 1, 2, 3, 8, 9]
    assert packing.sources.tolist() == [2, 3, 2, 4, 5]
    assert (packing.trunks.length.tolist(), packing.branches.length.tolist()) == ([3], [1, 2])


def test_rows_after_the_last_target_are_not_computed():
    sample = sibling([1, 2, 3, 4])
    sample.loss_mask = [1, 0, 0, 0]
    assert pack(collate([sample])).rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("field", "values", "shared"),
    [
        (ROUTES, ([[0, 0], [1, 1], [2, 2], [3, 3]], [[0, 0], [1, 1], [9, 2], [3, 3]]), 2),
        (ROUTES, ([[0, 0]] * 4, [[0, 0]] * 4), 3),
        (NOTES, ([0.5, 0.25], [0.75, 0.0]), 3),
        (PICKS, ([[1], [2, 3], [4], [], []], [[1], [2, 4], [4], [], []]), 1),
        (PICKS, ([[1], [2, 3], [4], [], []], [[1, 1], [2, 3], [4], [], []]), 0),
    ],
)
def test_sharing_ends_where_an_input_column_differs(field, values, shared):
    one, other = (sibling(r, **{field.name: v}) for r, v in zip(([1, 2], [3, 4]), values, strict=True))
    packing = pack(collate([one, other], [field]))
    assert len(packing.rows) == 2 * 4 - shared


def test_prompts_that_are_recorded_for_some_siblings_only_are_not_shared():
    packing = pack(collate([sibling([1, 2], routes=[[0, 0]] * 4), sibling([3, 4])], [ROUTES]))
    assert len(packing.rows) == 8


def test_a_target_that_nothing_predicts_is_refused():
    with pytest.raises(ValueError, match="first token"):
        pack(collate([Sample(tokens=[1, 2], response_length=2)]))


def test_a_batch_without_targets_keeps_one_row():
    packing = pack(collate([Sample(tokens=[1, 2], response_length=1, loss_mask=[0])]))
    assert packing.rows.tolist() == [0] and len(packing.targets) == 0


def test_groups_stay_together_while_they_fit():
    samples = [
        Sample(tokens=[*range(8), 1, 2, 3], response_length=3, group_index=g, index=4 * g + i)
        for g in range(3)
        for i in range(4)
    ]
    assert split(collate(samples), max_tokens=16) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert split(collate(samples), max_tokens=12) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert len(split(collate(samples), micro_batch_size=5)) == 3
    assert torch.equal(collate(samples).select(split(collate(samples))[0]).tokens, collate(samples).tokens)


def make_groups(count, prompt, responses):
    return collate(
        [
            Sample(tokens=[*range(prompt), *[i] * n], response_length=n, group_index=g, index=len(responses) * g + i)
            for g in range(count)
            for i, n in enumerate(responses)
        ]
    )


def test_groups_are_divided_where_that_needs_fewer_micro_batches_and_few_more_rows():
    batch = make_groups(8, 4, [33] * 4)  # 4 + 4 * 32 rows each, so that a micro-batch of 200 would hold one group
    found = split(batch, max_tokens=200)
    rows = [len(pack(batch.select(samples)).rows) for samples in found]
    assert len(found) == 6 and max(rows) <= 200 and min(rows) > 150 and sum(rows) == 8 * 132 + 4 * 4
    assert [i for samples in found for i in samples] == list(range(32))
    long = make_groups(8, 100, [33] * 4)  # dividing a group would compute its 100 rows again
    assert split(long, max_tokens=350) == [[4 * g, 4 * g + 1, 4 * g + 2, 4 * g + 3] for g in range(8)]


def test_micro_batches_are_of_similar_size_if_that_needs_no_more_of_them():
    def sizes(lengths, limit):
        samples = [
            Sample(tokens=[*range(n + 1)], response_length=1, group_index=i, index=i) for i, n in enumerate(lengths)
        ]
        return sorted(sum(lengths[i] for i in found) for found in split(collate(samples), max_tokens=limit))

    assert sizes([10] * 32, 150) == [100, 110, 110]
    assert sizes([40, 30, 20, 10, 5], 60) == [50, 55]
    assert sizes([60, 40, 40, 30, 30], 100) == [100, 100]  # only first fit needs no third one
    assert sizes([120, 10, 10], 50) == [20, 120]
